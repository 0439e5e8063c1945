"""Norms that transformers, timm and diffusers write out: after `convert` this package computes what they did."""

import contextlib
import copy
import importlib
import pickle
import types

import pytest
import torch
from torch.testing import assert_close

import primitives as pr
from primitives._audit.nestings import InFloat64, difference, nested
from tests.call_properties import CallRecorder
from tests.support import normal

SIZE = 6
LOW = (torch.bfloat16, torch.float16)
IMAGES = (5, SIZE, 3, 4)
EPS = {"eps": 1e-2}
T, D = "transformers.models.", "diffusers.models."
# One class of each text, with how it is made.
NORMS = {
    T + "llama.modeling_llama.LlamaRMSNorm": EPS,
    T + "mamba.modeling_mamba.MambaRMSNorm": EPS,
    T + "gemma.modeling_gemma.GemmaRMSNorm": EPS,
    T + "gpt_oss.modeling_gpt_oss.GptOssRMSNorm": EPS,
    T + "t5.modeling_t5.T5LayerNorm": EPS,
    T + "gemma3n.modeling_gemma3n.Gemma3nRMSNorm": EPS,
    T + "nanochat.modeling_nanochat.NanoChatRMSNorm": {"": (), **EPS},
    T + "cohere.modeling_cohere.CohereLayerNorm": EPS,
    T + "helium.modeling_helium.HeliumRMSNorm": EPS,
    T + "pocket_tts.modeling_pocket_tts.PocketTTSFlowLayerNorm": EPS,
    T + "moshi.modeling_moshi.MoshiRMSNorm": EPS,
    T + "cpmant.modeling_cpmant.CpmAntLayerNorm": {"": (types.SimpleNamespace(eps=1e-2, hidden_size=SIZE),)},
    T + "deberta.modeling_deberta.DebertaLayerNorm": {"": (SIZE, 1e-2)},
    T + "gradium_phonon_tts.modeling_gradium_phonon_tts.GradiumPhononTTSTimestepNorm": EPS,
    T + "imagegpt.modeling_imagegpt.ImageGPTLayerNorm": EPS,
    T + "llama4.modeling_llama4.Llama4TextRMSNorm": EPS,
    T + "muse_spark.modeling_muse_spark.MuseSparkTextCenteredRMSNorm": EPS,
    T + "qwen4_exp.modeling_qwen4_exp.Qwen4ExpTextRMSNorm": EPS,
    T + "vitdet.modeling_vitdet.VitDetLayerNorm": EPS,
    T + "xlstm.modeling_xlstm.xLSTMRMSNorm": EPS,
    "timm.layers.RmsNorm2d": EPS,
    "timm.layers.RmsNorm2dFp32": EPS,
    "timm.layers.RmsNormAct2d": {"act_layer": torch.nn.ReLU, **EPS},
    "timm.layers.RmsNormAct2dFp32": EPS,
    "timm.layers.BatchNormAct2d": {"act_layer": torch.nn.ReLU, **EPS},
    D + "normalization.RMSNorm": {"": (SIZE, 1e-2), "bias": True},
    D + "normalization.MochiRMSNorm": {"": (SIZE, 1e-2)},
    D + "transformers.transformer_cosmos3.Cosmos3NemotronRMSNorm": EPS,
    D + "transformers.transformer_qwenimage21.QwenImage21ZeroCenterRMSNorm": EPS,
    D + "transformers.transformer_stable_audio3.StableAudio3RMSNorm": EPS,
    "diffusers.pipelines.kolors.text_encoder.RMSNorm": {"": ((SIZE,),), **EPS},
}
EACH = pytest.mark.parametrize("name", NORMS, ids=lambda name: name.rpartition(".")[2])


def made(name):
    """A norm with random parameters, a converted copy, and the shape of its input."""
    path, _, cls = name.rpartition(".")
    library = pytest.importorskip(path.partition(".")[0], reason="not installed: run make test-models")
    try:
        cls = getattr(importlib.import_module(path), cls)
    except (ImportError, AttributeError):
        pytest.skip(f"{library.__name__} {library.__version__} does not have it")
    options = dict(NORMS[name])
    norm = cls(*options.pop("", (SIZE,)), **options)
    for i, value in enumerate(norm.parameters()):
        value.data = (1.0 + 0.5 * normal(value.shape, i)).float()
    is_of_images = isinstance(norm, torch.nn.BatchNorm2d) or "2d" in cls.__name__ or "VitDet" in cls.__name__
    return norm, pr.nn.convert(copy.deepcopy(norm)), IMAGES if is_of_images else (5, 7, SIZE)


def modeling(model):
    path = f"transformers.models.{model}.modeling_{model}"
    return pytest.importorskip(path, reason="transformers is not installed: run make test-models")


def run(module, x):
    """Output and gradients, and the operators of this package that ran."""
    x = x.clone().requires_grad_()
    with CallRecorder() as recorder:
        y = module(x)
    return (y, *torch.autograd.grad(y.double().sin().sum(), [x, *module.parameters()])), recorder.names


@EACH
def test_values_and_derivatives_of_two_orders(name):
    theirs, ours, shape = made(name)
    assert type(ours) is type(theirs)
    assert list(pr.nn.converted(ours)) == [""]
    keys, attributes = list(theirs.state_dict()), set(vars(theirs))
    theirs, ours, x = theirs.double(), ours.double(), normal(shape, 4)
    with InFloat64():
        expected = run(copy.deepcopy(theirs), x)[0]
        for module in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            found, operators = run(module, x)
            assert {"layer_norm", "batch_norm_relu"} & {*operators}
            assert_close(found, expected, rtol=1e-10, atol=1e-10)
            assert list(module.state_dict()) == keys

        v = [normal(shape, 5)]
        slope = nested(lambda x: theirs.eval()(x).pow(3).sum(), v, "r")
        found = nested(lambda x: ours.eval()(x).pow(3).sum(), v, "fr")(x)
        assert_close(found, difference(slope, v)(x), rtol=1e-6, atol=1e-6)
    assert set(vars(pr.nn.revert(ours))) == attributes


@EACH
@pytest.mark.parametrize("parameters", ["as input", "float32"])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_it_rounds_as_it_did(name, dtype, parameters, autocast):
    """The same bits in low precision, but where sums of another order tip one of them."""
    theirs, ours, shape = made(name)
    if parameters == "as input":
        theirs, ours = theirs.to(dtype), ours.to(dtype)
    x = normal((64, *shape[1:]), 5).to(dtype)
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        try:
            want, _ = run(theirs, x)
        except RuntimeError as error:
            with pytest.raises(type(error)):
                ours(x)
            return
        found, operators = run(ours, x)
    assert [y.dtype for y in found] == [y.dtype for y in want]
    if dtype not in LOW or getattr(ours.forward.function, "cast", "") != "wide":
        assert {"layer_norm", "batch_norm_relu"} & {*operators}
    if dtype in LOW and not isinstance(ours, torch.nn.BatchNorm2d):
        assert ((found[0] - want[0]).abs() <= (0.0 if want[0].dtype in LOW else 1e-5)).float().mean() > 0.99
    for y, expected in zip(found, want, strict=True):
        scale = expected.abs().max().item()
        assert_close(y, expected, rtol=0.0, atol=scale * (4e-2 if dtype in LOW else 1e-5))


MODELS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma2", "gemma3", "gemma3n", "granite", "cohere")


@pytest.mark.parametrize("model", MODELS)
def test_the_norms_of_models_are_known(model):
    module = modeling(model)
    norms = [cls for name, cls in vars(module).items() if name.endswith(("RMSNorm", "LayerNorm"))]
    own = [cls for cls in norms if cls.__module__ == module.__name__]
    assert own
    assert all(pr.nn.converted(pr.nn.convert(cls(SIZE))) for cls in own)


def test_a_batch_norm_and_a_relu_are_one_call_unless_somebody_sees_it():
    timm = pytest.importorskip("timm", reason="not installed: run make test-models")
    x, calls = normal(IMAGES, 1), []
    theirs = timm.layers.BatchNormAct2d(SIZE).double().eval()
    ours = pr.nn.convert(copy.deepcopy(theirs))

    def used():
        with CallRecorder() as recorder:
            assert_close(ours(x), theirs(x))
        return recorder.names

    assert used() == {"batch_norm_relu_eval"}
    hook = ours.act.register_forward_hook(lambda *args: calls.append("hook"))
    assert (used(), calls) == ({"batch_norm_eval"}, ["hook"])
    hook.remove()
    ours.train(), theirs.train()
    assert used() == {"batch_norm_relu", "write_back"}
    assert_close(ours.state_dict(), theirs.state_dict())
    ours.act, theirs.act = torch.nn.SiLU(), torch.nn.SiLU()
    assert used() == {"batch_norm", "write_back"}


def test_calls_that_the_table_does_not_serve_run_as_they_are_written():
    llama = modeling("llama")
    theirs = llama.LlamaRMSNorm(SIZE)
    ours, x = pr.nn.convert(copy.deepcopy(theirs)), normal((3, SIZE), 1).float()
    assert torch.equal(ours(hidden_states=x), theirs(x))
    for call in (lambda: ours(x, x), lambda: ours(other=x)):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(RuntimeError, match="size of tensor"):
        ours(x[:, :4])
    # Sizes of one axis broadcast, as the class is written.
    assert torch.equal(ours(x[:, :1]), theirs(x[:, :1]))
    for module in (ours, theirs):
        module.variance_epsilon = 0.5
        module.weight = torch.nn.Parameter(2 * torch.ones(SIZE))
    assert_close(ours(x), theirs(x))


def test_a_changed_text_or_a_subclass_is_left():
    llama = modeling("llama")

    class Mine(llama.LlamaRMSNorm):
        pass

    class Changed(llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states)

    Changed.__module__ = llama.__name__
    for cls in (Mine, Changed):
        assert not pr.nn.converted(pr.nn.convert(cls(SIZE)))


def test_a_converted_norm_compiles_into_one_graph():
    llama = modeling("llama")
    model = pr.nn.convert(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), llama.LlamaRMSNorm(SIZE))).double()
    x = normal((3, SIZE), 1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(*[torch.autograd.grad(f(x).sin().sum(), list(model.parameters())) for f in (compiled, model)])
