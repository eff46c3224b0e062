"""Architectures have the parameters of the published checkpoints, and a configuration that cannot be is refused in one line."""

import pytest

from dpro_search.errors import InputError
from dpro_search.parallel import names
from dpro_search.parallel.model import blocks_of, from_config, parameters_of, published
from tests.every_case import every_case

CHECKPOINTS = {  # parameters of the weights on the Hugging Face hub
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "vit-b16": 86_567_656,
    "bloom-176b": 176_247_271_424,
    "opt-1.3b": 1_315_758_080,
    "opt-30b": 29_974_540_288,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-405b": 405_853_388_800,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-7b": 8_537_680_896,
    "gemma2-27b": 27_227_128_320,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-120b": 116_829_156_672,
    "pythia-6.9b": 6_857_302_016,
    "gpt-j-6b": 6_050_882_784,
    "falcon-7b": 6_921_720_704,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "starcoder2-3b": 3_030_371_328,
    "olmo-7b": 6_888_095_744,
}
SMALL = {  # parameters of what transformers 4.57 builds of a small configuration
    "bloom": ({"n_layer": 3, "hidden_size": 96, "n_head": 4, "vocab_size": 1000}, 431_904),
    "mpt": ({"n_layers": 3, "d_model": 96, "n_heads": 4, "vocab_size": 50368}, 5_167_776),
    "qwen2_moe": (
        {
            "num_hidden_layers": 3,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 64,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "vocab_size": 1000,
        },
        531_552,
    ),
    "gemma3_text": (
        {
            "num_hidden_layers": 12,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 200,
            "vocab_size": 1000,
        },
        1_382_496,
    ),
}


@every_case(("name", "parameters"), CHECKPOINTS.items())
def test_a_published_model_has_the_parameters_of_its_checkpoint(name, parameters):
    assert parameters_of(published(name)) == parameters


@pytest.mark.parametrize("family", SMALL)
def test_a_configuration_has_the_parameters_of_the_model_that_it_builds(family):
    values, parameters = SMALL[family]
    assert parameters_of(from_config({"model_type": family, **values})) == parameters


def test_a_gpt2_whose_configuration_unties_its_embeddings_has_two():
    small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 1000}
    tied, untied = (from_config({**small, "tie_word_embeddings": yes}) for yes in (True, False))
    assert from_config(small) == tied
    assert parameters_of(untied) - parameters_of(tied) == 64 * 1000


@every_case("name", names())
def test_ops_read_what_ops_before_them_wrote(name):
    for block in blocks_of(published(name)):
        made = {""}
        for op in block.ops:
            assert made.issuperset(op.inputs), op.name
            made.add(op.name)
            assert made.issuperset(op.saves), op.name
        assert set(block.sizes_at(2, 128)) >= {dim for op in block.ops for dim in op.dims}


def test_forward_flops_of_a_layer_are_those_of_the_formula():
    """24 b s h^2 + 4 b s^2 h (Narayanan et al. 2021), half of the second for causal attention."""
    layer = blocks_of(published("gpt3-175b"))[1]
    sizes = layer.sizes_at(2, 2048)
    flops = sum(op.forward_flops(sizes) for op in layer.ops)
    assert flops == pytest.approx(2 * 2048 * 12288 * (24 * 12288 + 2 * 2048))


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}


@every_case(
    ("values", "said"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not known"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "a model has at most 10000 layers, not 1000000"),
        ({**LLAMA, "vocab_size": 10**30}, "vocab_size must be at most 2147483648, not 1000"),
        ({"model_type": "gpt2", "n_embd": 100, "n_head": 12}, "does not divide by 12 heads"),
        ({"model_type": "bloom", "hidden_size": 65, "n_head": 4}, "does not divide by 4 heads"),
        ({"model_type": "mpt", "d_model": 64, "n_heads": 0}, "must be at least 1, not 0"),
        ({"model_type": "gptj", "n_embd": 64, "n_head": 0}, "must be at least 1, not 0"),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": "4096"},
            "must be a whole number, not '4096'",
        ),
        (
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 5,
            },
            "multiple of kv_heads",
        ),
        ({"model_type": "deepseek_v2", "hidden_size": 4096}, "mine.json: num_experts_per_tok is missing"),
    ],
)
def test_an_impossible_configuration_is_one_line(values, said):
    with pytest.raises(InputError, match=said) as error:
        from_config(values, "mine.json")
    assert "\n" not in str(error.value)


def test_a_family_that_is_not_known_is_read_by_the_usual_keys():
    usual = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    assert parameters_of(from_config({"model_type": "new", **usual})) == CHECKPOINTS["llama3-8b"]
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14336}
    (layer,) = from_config({"model_type": "new", **usual, **experts}).layers
    assert (layer.feed_forward.count, layer.feed_forward.top_k) == (8, 2)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(InputError, match="llama3-8b"):
        published("llama-3-8b")


def test_sizes_that_a_file_leaves_out_are_the_defaults_of_its_configuration_class():
    """Gemma 3's files leave out what `Gemma3TextConfig` has already; what was assumed is said, and null is no omission."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    model = from_config({"model_type": "gemma3", "text_config": text})
    assert (model.vocab, model.layers[0].attention.heads, model.layers[0].attention.kv_heads) == (262208, 8, 4)
    assert "config.json: vocab_size is not given; 262208 is the default of Gemma3TextConfig" in model.assumed
    alone = from_config({"model_type": "mistral", "num_key_value_heads": None})
    assert alone.layers[0].attention.kv_heads == 32
    assert not any("num_key_value_heads" in sentence for sentence in alone.assumed)


def test_built_in_models_assume_nothing():
    assert not [name for name in names() if published(name).assumed]
