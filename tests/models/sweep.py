"""Whether gradients through a JVP are right: of each model of transformers that can be built small, and of timm.

Each is converted, in float64, and the gradient, in its input, of the tangent of its output is held against central
differences. `python -m tests.models.sweep` takes an hour or two on one core, with names (`BertConfig`, `resnet18`)
less; it prints a line for each model, and what became of all.
"""

from __future__ import annotations

import collections
import inspect
import subprocess
import sys

import torch

import primitives as pr
import tests.models.conftest  # noqa: F401 - before the libraries
from perf.ops.samples import normal
from primitives._audit.nestings import InFloat64

# Sizes that a configuration is given where it has these names.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "mlp_dim"), 48),
    **dict.fromkeys(("num_key_value_heads", "num_local_experts", "num_experts", "n_routed_experts"), 2),
    **{
        "vocab_size": 99,
        "n_words": 99,
        "max_position_embeddings": 64,
        "n_positions": 64,
        "image_size": 32,
        "patch_size": 8,
    },
    **{"head_dim": 8, "d_kv": 8, "num_experts_per_tok": 1, "pad_token_id": 0},
}
MOST_PARAMETERS = 80_000_000
# Smaller ones where larger ones cross kinks.
STEPS = (1e-5, 1e-7, 1e-8)


def shrink(config):
    """The configuration with small sizes, and those inside it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value)
        elif name in SMALL and isinstance(value, int):
            setattr(config, name, SMALL[name])
    return config


def of_transformers(name):
    """A model, its input, and the call that takes it."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config_class = next(cls for cls in MODEL_MAPPING if cls.__name__ == name)
    cls, config = MODEL_MAPPING[config_class], shrink(config_class())
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if kinds:
        config.layer_types = (2 * kinds)[:2]
    model = (cls[0] if isinstance(cls, (tuple, list)) else cls)(config)
    takes = inspect.signature(model.forward).parameters
    given = {"decoder_input_ids": torch.arange(3, 13).view(2, 5)} if "decoder_input_ids" in takes else {}
    if "inputs_embeds" in takes and "pixel_values" not in takes:
        name, shape = "inputs_embeds", (2, 7, model.get_input_embeddings().weight.shape[-1])
    elif "pixel_values" in takes and "input_ids" not in takes:
        name, shape = "pixel_values", (2, 3, *2 * (SMALL["image_size"],))
    else:
        raise ValueError(f"takes {', '.join(takes)}")
    return model.eval(), normal(shape, 1), lambda x: model(**{name: x}, **given)


def of_timm(name):
    """The same of timm."""
    import timm

    try:
        model = timm.create_model(name, num_classes=7, img_size=64)
    except TypeError:
        model = timm.create_model(name, num_classes=7)
    return model.eval(), normal((2, 3, 64, 64), 1), model


def first(y):
    """The first result, of tensors with a derivative."""
    values = [y] if isinstance(y, torch.Tensor) else y if isinstance(y, (tuple, list)) else y.values()
    return next(value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())


def error(name):
    """The smallest relative error that any step finds, or why the model does not run in plain torch."""
    torch.manual_seed(0)
    with pr.repair_torch(), InFloat64():
        try:
            model, x, call = (of_transformers if name.endswith("Config") else of_timm)(name)
            if sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
                return "not built: large"
            model.double()
            w = normal(first(call(x)).shape, 2)
        except Exception as reason:
            return f"not built: {type(reason).__name__}: {str(reason)[:80]}"
        pr.nn.convert(model)
        v, u = normal(x.shape, 3), normal(x.shape, 4)

        def slope(x):
            return (torch.func.jvp(lambda x: first(call(x)), (x,), (v,))[1] * w).sum()

        found = (torch.func.grad(slope)(x) * u).sum().item()
        true = [((slope(x + h * u) - slope(x - h * u)) / (2 * h)).item() for h in STEPS]
    return min(abs(found - each) / max(abs(each), 1e-3) for each in true)


def names():
    """All of transformers, and of timm the first of each file."""
    import timm
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    yield from (cls.__name__ for cls in MODEL_MAPPING)
    yield from {timm.model_entrypoint(name).__module__: name for name in reversed(timm.list_models())}.values()


def main():
    """Each in a process of its own, since some models take all memory."""
    if sys.argv[1:2] == ["--one"]:
        print(error(sys.argv[2]))  # noqa: T201 - for the process that asks
        return
    counts = collections.Counter()
    for name in sys.argv[1:] or names():
        command = [sys.executable, "-W", "ignore", "-m", "tests.models.sweep", "--one", name]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=300)
            outcome = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()[-1]
        except (subprocess.TimeoutExpired, IndexError):
            outcome = "not built: too slow, or too large"
        is_number = outcome[:1].isdigit()
        kind = ("right" if float(outcome) < 1e-4 else "wrong") if is_number else outcome.partition(":")[0]
        counts[kind if is_number or kind == "not built" else "raises"] += 1
        print(f"{name:<32} {kind if is_number else ''} {outcome}", flush=True)  # noqa: T201 - what a user asked for
    print(*(f"{count} {kind}" for kind, count in counts.items()), sep=", ")  # noqa: T201 - likewise


if __name__ == "__main__":
    main()
