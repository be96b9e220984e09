"""Makes the embedded default policy: `python -m nous_node.trainer.warmstart --out FOLDER`.

A byte-level Llama of 148 k parameters that has seen how sorted digits look but answers right only part of
the time: reinforcement learning needs some right answers to start from, and room to improve. Random initial
weights do not learn (99 % of groups have no variance). The folder under `trainer/default` was made by this
script and is shipped, so that the weights are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

BYTES = 256
PAD, BOS, EOS = 256, 257, 258
SPECIALS = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>"}

# Of the first three: .36 to .45 of held-out tasks right, where 0 and 1 begin at .75 with little to learn.
SEED = 2
STEPS = 150
BATCH = 128
RATE = 3e-3
DIGITS = 4
RIGHT_SHARE = 0.5  # the other answers are random digits of the same length: form without content


def make_config() -> LlamaConfig:
    """The architecture of the embedded default."""
    return LlamaConfig(
        vocab_size=BYTES + len(SPECIALS),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def make_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of UTF-8 themselves; then pad, bos, eos. Every text round-trips."""
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(_byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS.values()))
    return tokenizer


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(BYTES) if b not in printable)
    letters = {b: chr(b) for b in printable} | {b: chr(BYTES + n) for n, b in enumerate(others)}
    return [letters[b] for b in range(BYTES)]


def make_batch(rng: random.Random, size: int, digits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [size, 2 * digits + 7] of whole tasks with answers, and the labels (-100 on the prompt)."""
    rows, labels = [], []
    for _ in range(size):
        task = [rng.choice("0123456789") for _ in range(digits)]
        right = rng.random() < RIGHT_SHARE
        answer = sorted(task) if right else [rng.choice("0123456789") for _ in range(digits)]
        prompt = list(f"sort {''.join(task)}=".encode())
        ending = [*"".join(answer).encode(), EOS]
        rows.append(prompt + ending)
        labels.append([-100] * len(prompt) + ending)
    return torch.tensor(rows), torch.tensor(labels)


def warm_start(seed: int, steps: int) -> LlamaForCausalLM:
    """A freshly initialised model after `steps` supervised steps; a function of `seed` on one machine."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = LlamaForCausalLM(make_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        tokens, labels = make_batch(rng, BATCH, DIGITS)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def greedy_accuracy(model: LlamaForCausalLM, seed: int, tasks: int = 256) -> float:
    """The share of `tasks` tasks answered wholly right, EOS included, with the likeliest token each time."""
    rng = random.Random(f"held-out {seed}")
    tokens, labels = make_batch(rng, tasks, DIGITS)
    prompt = int((labels[0] == -100).sum())
    right = torch.tensor([[*sorted(row[5 : 5 + DIGITS]), EOS] for row in tokens.tolist()])
    done = tokens[:, :prompt]
    with torch.inference_mode():
        for _ in range(DIGITS + 1):
            chosen = model(input_ids=done).logits[:, -1].argmax(-1, keepdim=True)
            done = torch.cat((done, chosen), 1)
    return float((done[:, prompt:] == right).all(1).float().mean())


def write_folder(model: LlamaForCausalLM, folder: Path) -> None:
    """The plain transformers folder: config, tokenizer, weights in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = torch.bfloat16
    config = model.config.to_diff_dict()
    config.pop("transformers_version")  # would change with each release and says nothing
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": SPECIALS[i] for name, i in (("pad", PAD), ("bos", BOS), ("eos", EOS))}
    tokenizer_config = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    weights = {n: w.detach().to(torch.bfloat16).contiguous() for n, w in model.named_parameters()}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it private


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded default policy.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order: the same weights every time on one kind of machine
    model = warm_start(arguments.seed, arguments.steps)
    write_folder(model, arguments.out)
    print(json.dumps({"folder": str(arguments.out), "greedy": greedy_accuracy(model, arguments.seed)}))


if __name__ == "__main__":
    main()
