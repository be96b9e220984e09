"""Thresholds that were measured on honest rollouts of a model: found by the hash of its weights.

`nous-node calibrate` makes such a file; those in the package's folder `calibrations` were made with it, those
in a home's folder of that name by its owner. `init` takes the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Thresholds

PACKAGED = Path(__file__).parent / "calibrations"
EMBEDDED_NAME = "nous-default"
EMBEDDED = PACKAGED / f"{EMBEDDED_NAME}-float32.json"
"""Of the embedded default policy."""


class Calibration(msgspec.Struct, frozen=True):
    """What a calibration file holds."""

    name: str
    """Of the model, for people."""
    dtype: str
    """What the rollouts were generated in."""
    thresholds: Thresholds
    """`thresholds.model` says for which weights."""


def read_calibration(file: Path) -> Calibration:
    """Raises LocalError for a file that is none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Calibration)
    except OSError as error:
        raise LocalError(f"The calibration {file} cannot be read ({error.strerror}).") from error
    except msgspec.DecodeError as error:
        raise LocalError(
            f"{file} is no calibration ({error}); make one with `nous-node calibrate MODEL`."
        ) from error


def write_calibration(file: Path, calibration: Calibration) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")


def embedded_thresholds() -> Thresholds:
    """Of the embedded default in float32."""
    return read_calibration(EMBEDDED).thresholds


def find_thresholds(weights: bytes, dtype: str, home: Path | None = None) -> Thresholds | None:
    """Those calibrated for these weights (`checkpoints.weights_hash`) and this dtype on the most groups, so
    that a quick try replaces nothing; the home's where two are alike. None where there are none."""
    found = [read_calibration(file) for file in _files(home)]
    fitting = [one.thresholds for one in found if one.dtype == dtype and one.thresholds.model == weights]
    return max(fitting, key=lambda one: one.groups, default=None)


def _files(home: Path | None) -> Iterator[Path]:
    if home is not None:
        yield from sorted((home / "calibrations").glob("*.json"))
    yield from sorted(PACKAGED.glob("*.json"))
