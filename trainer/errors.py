"""The errors of the trainer: each text is one sentence saying what was wrong and what to do next.

NousError
└── TrainerError
    ├── ModelError          a model folder that cannot be used
    ├── TensorError         tensors that do not belong to this model: names, shapes, dtypes
    ├── LogitsError         the model computed NaN or infinity
    ├── RequestError        a generation or prefill request outside the model's limits
    ├── BatchError          samples that cannot be put into a batch
    ├── CheckpointError     a checkpoint folder that is damaged or cannot be written
    └── ConfigError         a setting of the update outside its range
"""

from __future__ import annotations

from nous_node.protocol.errors import NousError


class TrainerError(NousError):
    """Any error of the trainer."""


class ModelError(TrainerError):
    """A model folder that cannot be used."""


class TensorError(TrainerError):
    """Tensors that do not belong to this model: a wrong name, shape or dtype."""


class LogitsError(TrainerError):
    """The model computed a distribution that is none: NaN, +inf, or -inf everywhere."""


class RequestError(TrainerError):
    """A generation or prefill request outside the model's limits."""


class BatchError(TrainerError):
    """Samples that cannot be put into a batch."""


class CheckpointError(TrainerError):
    """A checkpoint folder that is damaged or cannot be written."""


class ConfigError(TrainerError):
    """A setting of the update outside its range."""
