"""Norms that transformers, timm and diffusers write out themselves, and how this package computes them.

Most classes are copies of a few texts. The table has a digest of each text, so that it holds for every version of a
library that has the text, and a class that computes something else in another version is none of the table's.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from primitives import functional
from primitives.nn._base import batch_normed
from primitives.ops.arguments import LOW_PRECISION

_LIBRARIES = ("transformers", "timm", "diffusers")
# Other subclasses of tensors run the class's own operations.
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)


@dataclass(frozen=True, repr=False)
class _Norm:
    """How a class computes: the names of its attributes, and where it rounds an input of low precision.

    With `cast` of "input" it rounds once, to the input's dtype; of "first", also before the scale, and the result has
    the dtype that both promote to; of "weight" likewise, to the dtype of the weight; with "wide" it rounds at places
    that this package has not, and computes inputs of low precision by itself. It does so too unless the attribute
    named by `when` is the value there.
    """

    eps: str = "variance_epsilon"
    cast: str = "input"
    scale: str | None = "weight"
    shift: str | None = None
    centered: bool = False
    add_one: bool = False
    axis: int = -1
    parts: tuple[str, ...] = ()
    when: tuple[str, Any] | None = None

    def __repr__(self) -> str:
        return f"primitives.functional.{'layer_norm' if self.centered else 'rms_norm'}"

    def __call__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result for the one argument `input`, or NotImplemented for what the class computes by itself."""
        weight, bias = (None if name is None else getattr(module, name, None) for name in (self.scale, self.shift))
        if len(args) != 1 or kwargs or not self._serves(module, args[0], weight, bias):
            return NotImplemented
        (x,) = args
        if torch.is_autocast_enabled(x.device.type):
            # The operations that the classes are written in take no part in autocast.
            with torch.autocast(x.device.type, enabled=False):
                y = self._computed(module, x, weight, bias)
        else:
            y = self._computed(module, x, weight, bias)
        for name in self.parts:
            y = getattr(module, name)(y)
        return y

    def _serves(self, module: torch.nn.Module, x: Any, weight: Any, bias: Any) -> bool:
        if type(x) not in _PLAIN or x.layout is not torch.strided or x.is_nested:
            return False
        if x.dim() != 4 if self.axis == 1 else x.dim() == 0:
            return False
        if self.when is not None and getattr(module, self.when[0]) != self.when[1]:
            return False
        is_low = x.dtype in LOW_PRECISION
        if not (x.dtype in (torch.float32, torch.float64) or (is_low and self.cast != "wide")):
            return False
        for value in (weight, bias):
            if value is not None and (type(value) not in _PLAIN or value.shape != (x.shape[self.axis],)):
                return False
        if weight is None:
            return bias is None
        if bias is not None and bias.dtype != weight.dtype:
            return False
        return weight.dtype == x.dtype or (is_low and weight.dtype == torch.float32)

    def _computed(self, module: torch.nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        eps, mixed = getattr(module, self.eps), None if weight is None or weight.dtype == x.dtype else weight
        x = x.movedim(1, -1) if self.axis == 1 else x
        if mixed is not None and self.cast == "weight":
            x = x.to(mixed.dtype)
        # The tracer of TorchScript has tensors for sizes; that of a norm is a constant of its.
        shape = tuple(map(int, x.shape[-1:])) if torch.jit.is_tracing() else tuple(x.shape[-1:])
        if self.centered:
            y = functional.layer_norm(x, shape, weight, bias, eps)
        else:
            if mixed is not None and self.cast == "first":
                y = functional.rms_norm(x, shape, None, eps) * mixed
            else:
                rounds = self.cast in ("first", "weight")
                y = functional.rms_norm(x, shape, weight, eps, add_one=self.add_one, cast_first=rounds)
            y = y if bias is None else y + bias
        # A part may write in place, which torch refuses for a view of what a rule returns.
        return y.movedim(-1, 1).clone(memory_format=torch.contiguous_format) if self.axis == 1 else y


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_unwatched(part: torch.nn.Module, cls: type) -> bool:
    return type(part) is cls and "forward" not in vars(part) and not any(getattr(part, name) for name in _HOOKS)


def batch_norm_act(module: Any, *args: Any, **kwargs: Any) -> Any:
    """`BatchNormAct2d` of timm; with a ReLU, which nobody watches, by one call."""
    if len(args) != 1 or kwargs or type(args[0]) not in _PLAIN or args[0].dim() != 4:
        return NotImplemented
    if _is_unwatched(module.act, torch.nn.ReLU) and _is_unwatched(module.drop, torch.nn.Identity):
        return batch_normed(functional.batch_norm_relu, module, args[0])
    return module.act(module.drop(batch_normed(functional.batch_norm, module, args[0])))


def _digest(cls: type) -> str:
    """Of the code of `forward` and of the methods that it calls, without annotations and comments."""
    names = [name for name in sorted(cls.forward.__code__.co_names) if not hasattr(torch.nn.Module, name)]
    methods = [cls.forward, *(value for name in names if inspect.isfunction(value := getattr(cls, name, None)))]
    text = ""
    for method in methods:
        # Of the code object: a function that wraps another one would show the text of that.
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(method.__code__))).body
        for part in definition.body:  # type: ignore[attr-defined] - a function's
            if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)):
                text += ast.dump(part, annotate_fields=False)
    # Versions of Python differ in what they show of empty fields.
    return hashlib.sha256(re.sub(r"\[\]|None|[ ,]", "", text).encode()).hexdigest()[:12]


def known_norm(cls: type[torch.nn.Module]) -> Callable[..., Any] | None:
    """The function that computes modules of exactly this class, from the module and the arguments, if there is one."""
    if cls.__module__.partition(".")[0] not in _LIBRARIES or "norm" not in cls.__name__.lower():
        return None
    try:
        return _TABLE.get(_digest(cls))
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError):
        return None  # Without a source, as in a frozen application, nothing is known of a class.


_TABLE: dict[str, Callable[..., Any]] = {
    "0a5c891c76ca": _Norm(cast="first"),  # LlamaRMSNorm and 139 copies
    "fc6fced3c15f": _Norm("eps", add_one=True),  # GemmaRMSNorm, Qwen3_5RMSNorm
    "378ddd730a66": _Norm(),  # GptOssRMSNorm, AfmoeRMSNorm
    "bf20f8b2b1db": _Norm(cast="weight"),  # T5LayerNorm of either library
    "43a3d7874596": _Norm("eps", when=("with_scale", True)),  # Gemma3nRMSNorm, Gemma4RMSNorm
    "a3370512e67d": _Norm("eps", scale=None),  # NanoChatRMSNorm, Llama4TextL2Norm
    "681fe3f69b41": _Norm(centered=True),  # CohereLayerNorm
    "5f7c758cd8b8": _Norm(),  # HeliumRMSNorm, NemotronHRMSNorm
    "7e6e938e54be": _Norm("eps", "wide", shift="bias", centered=True, when=("elementwise_affine", True)),  # Pocket TTS
    "d8cc976cd354": _Norm("eps"),  # MoshiRMSNorm
    "e4eb6bedde33": _Norm("eps", "first"),  # CpmAntLayerNorm
    "5009316b46bf": _Norm(cast="wide", shift="bias", centered=True),  # DebertaLayerNorm
    "689532b1dbb8": _Norm(cast="wide"),  # GradiumPhononTTSTimestepNorm
    "76d09f8b333a": _Norm("eps", "wide"),  # ImageGPTLayerNorm
    "34ebbf25275b": _Norm("eps", "first"),  # Llama4TextRMSNorm
    "95e2cebfa0be": _Norm("eps", "wide", add_one=True),  # MuseSparkTextCenteredRMSNorm
    "f7ad57f2d005": _Norm("eps", add_one=True, when=("group_size", None)),  # Qwen4ExpTextRMSNorm
    "14367fccd38b": _Norm("eps", "wide", shift="bias", centered=True, axis=1),  # VitDetLayerNorm
    "97339d1d2551": _Norm("eps", "first", shift="bias", when=("force_float32_reductions", True)),  # xLSTMRMSNorm
    "e44108b28f91": _Norm("eps", "wide", axis=1, when=("_fast_norm", False)),  # timm, RmsNorm2d
    "dc81f24371bc": _Norm("eps", axis=1),  # RmsNorm2dFp32
    "13935207a9b9": _Norm("eps", "wide", axis=1, parts=("drop", "act"), when=("_fast_norm", False)),  # RmsNormAct2d
    "56aa47018cf8": _Norm("eps", axis=1, parts=("drop", "act")),  # RmsNormAct2dFp32
    "1411935f75e5": batch_norm_act,
    "c257ea1c53fd": _Norm("eps", "weight", shift="bias"),  # diffusers, RMSNorm
    "da74a3b86e36": _Norm("eps"),  # MochiRMSNorm
    "477bdd07aaa5": _Norm("eps"),  # Cosmos3NemotronRMSNorm
    "ff5dc79bb62a": _Norm("eps", add_one=True),  # QwenImage21ZeroCenterRMSNorm
    "2ea576777ae8": _Norm("eps", scale="gamma", when=("force_fp32", True)),  # StableAudio3RMSNorm
    "f0d1550bc91a": _Norm("eps"),  # Kolors, RMSNorm
}
