"""Models of transformers, diffusers and timm: tiny, with random weights, built from configurations alone."""

import warnings
from typing import Any, NamedTuple

import pytest
import torch


class Case(NamedTuple):
    """A model, and a call of it: `argument` has the shape `shape` and is differentiated, `given` is the rest.

    `spread` is by how much weights differ from those that the library begins with.
    """

    name: str
    library: str
    cls: str
    config: dict[str, Any]
    argument: str
    shape: tuple[int, ...]
    given: dict[str, Any]
    spread: float = 0.2

    def build(self, dtype=torch.float64):
        """The model in evaluation, its weights far enough from zero that each of its layers matters."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            # Warnings of a library about the machine and its own dependencies, as it is imported.
            warnings.simplefilter("ignore")
            library = pytest.importorskip(self.library, reason=f"{self.library} is not installed: run make test-models")
            if self.library == "timm":
                model = library.create_model(self.cls, **self.config)
            else:
                cls = getattr(library, self.cls)
                model = cls(cls.config_class(**self.config)) if self.library == "transformers" else cls(**self.config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=self.spread)
        return model.to(dtype).eval()

    def call(self, model, x):
        given = {key: value.to(x.dtype) if value.is_floating_point() else value for key, value in self.given.items()}
        output = model(**{self.argument: x, **given})
        return (output if isinstance(output, torch.Tensor) else output[0]).to(x.dtype)


def _with(*bases, **values):
    return {key: value for base in (*bases, values) for key, value in base.items()}


T = torch.tensor
STEPS = _with(timestep=T([3, 5]))
CLASSES = _with(STEPS, class_labels=T([0, 1]))
TEXT = _with(STEPS, encoder_hidden_states=torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1)))
POOLED = _with(TEXT, pooled_projections=TEXT["encoder_hidden_states"][:, 0])
TOKENS = T([[1, 3, 4, 7, 2, 9], [1, 5, 6, 8, 3, 3]])
LEFT = _with(attention_mask=T([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]))
RIGHT = _with(attention_mask=T([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]))
LABELED = _with(RIGHT, labels=TOKENS)
DECODED = _with(decoder_input_ids=TOKENS)
BOTH = _with(RIGHT, DECODED)

GPT2 = _with(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
GPT2 = _with(GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
BERT = _with(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
VIT = _with(BERT, image_size=8, patch_size=4)
LLAMA = _with(BERT, num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=16)
T5 = _with(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu")
ENCODER = _with(encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, max_source_positions=6)
DECODER = _with(decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, max_target_positions=8)
SPECIAL = _with(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
WHISPER = _with(ENCODER, DECODER, SPECIAL, vocab_size=50, num_mel_bins=8, d_model=16)
LATENT = _with(sample_size=4, patch_size=2, in_channels=2, out_channels=2, num_layers=2, attention_head_dim=8)
DIT = _with(LATENT, num_attention_heads=2, num_embeds_ada_norm=10)
SD3 = _with(LATENT, num_attention_heads=2, pos_embed_max_size=4, joint_attention_dim=16, caption_projection_dim=16)
SD3 = _with(SD3, pooled_projection_dim=16)
FLUX = _with(
    patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, axes_dims_rope=(2, 2, 4)
)
FLUX = _with(FLUX, num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16)
PLACES = _with(img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(3, 3), timestep=T([0.3, 0.5]))
CONVNEXT = _with(num_channels=3, patch_size=2, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16)
TIMM_CONVNEXT = _with(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=4)
COATNET = _with(img_size=64, embed_dim=(8, 8, 32, 32), depths=(1, 1, 1, 1), stem_width=8, num_classes=10)
UNET = _with(sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, norm_num_groups=4, attention_head_dim=4)


def _levels(*kinds, **values):
    down, up = ([f"{kind}{side}Block2D" for kind in order] for side, order in (("Down", kinds), ("Up", kinds[::-1])))
    return _with(UNET, values, block_out_channels=[8] * len(kinds), down_block_types=down, up_block_types=up)


WORDS = ("inputs_embeds", (2, 6, 16))
PATCHES = ("hidden_states", (2, 2, 4, 4))
IMAGE = ("sample", (2, 2, 8, 8))
MODELS = [
    Case("gpt2", "transformers", "GPT2LMHeadModel", GPT2, *WORDS, RIGHT),
    Case("bert", "transformers", "BertForMaskedLM", BERT, *WORDS, LABELED),
    Case("llama", "transformers", "LlamaModel", LLAMA, *WORDS, LEFT),
    Case("qwen3", "transformers", "Qwen3Model", LLAMA, *WORDS, {}),
    Case("gemma", "transformers", "GemmaModel", LLAMA, *WORDS, {}),
    Case("t5", "transformers", "T5Model", T5, *WORDS, BOTH),
    Case("whisper", "transformers", "WhisperModel", WHISPER, "input_features", (2, 8, 12), DECODED),
    Case("vit", "transformers", "ViTModel", VIT, "pixel_values", (2, 3, 8, 8), {}),
    Case("convnext", "transformers", "ConvNextModel", CONVNEXT, "pixel_values", (2, 3, 16, 16), {}),
    Case("dit", "diffusers", "DiTTransformer2DModel", DIT, *PATCHES, CLASSES),
    Case("sd3", "diffusers", "SD3Transformer2DModel", SD3, *PATCHES, POOLED),
    Case("flux", "diffusers", "FluxTransformer2DModel", FLUX, "hidden_states", (2, 4, 4), _with(POOLED, PLACES)),
    Case("unet2d", "diffusers", "UNet2DModel", _levels("", "Attn"), *IMAGE, STEPS),
    Case(
        "unet2d_condition",
        "diffusers",
        "UNet2DConditionModel",
        _levels("", "CrossAttn", cross_attention_dim=16),
        *IMAGE,
        TEXT,
    ),
    Case("timm_vit", "timm", "test_vit", {"img_size": 32}, "x", (2, 3, 32, 32), {}),
    Case("timm_convnext", "timm", "convnext_atto", TIMM_CONVNEXT, "x", (2, 3, 32, 32), {}),
    Case("timm_efficientnet", "timm", "test_efficientnet", {"num_classes": 4}, "x", (2, 3, 64, 64), {}, 0.02),
    Case("timm_coatnet", "timm", "coatnet_0_224", COATNET, "x", (2, 3, 64, 64), {}),
]
# Inductor compiles one level of it in a minute or two.
LEVEL = _levels("CrossAttn", cross_attention_dim=16, mid_block_type=None)
CASES = {case.name: case for case in [*MODELS, Case("level", "diffusers", "UNet2DConditionModel", LEVEL, *IMAGE, TEXT)]}
