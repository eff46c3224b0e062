"""Tables of layers that others measured: their formats. Times are made up; nothing here says how near predictions are."""

import pytest

from dpro_search.costmodel.devices import OpSpec
from dpro_search.costmodel.devices.profile_tables import read_profile_table
from dpro_search.errors import InputError
from tests.every_case import every_case

LAYER = {
    "num_tokens": 256, "n_embd": 4096, "n_head": 32, "n_kv_head": 8, "n_expanded_embd": 14336, "vocab_size": 32000,
    "use_gated_mlp": True, "num_tensor_parallel_workers": 2, "time_stats.mlp_up_proj.median": 0.2,
    "time_stats.mlp_down_proj.median": 0.1, "time_stats.attn_pre_proj.median": 0.05, "time_stats.attn_post_proj.median": 0.04,
    "time_stats.input_layernorm.median": 0.006, "time_stats.attn_rope.median": 0.01, "time_stats.mlp_act.median": 0.009,
    "time_stats.emb.median": 0.005, "time_stats.add.median": 0.004, "time_stats.add.mean": 0.004,
}  # fmt: skip
ATTENTION = {
    "n_embd": 4096, "n_q_head": 32, "n_kv_head": 8, "block_size": 16, "num_tensor_parallel_workers": 1, "max_model_len": 4096,
    "batch_size": 1, "prefill_chunk_size": 512, "kv_cache_size": 1024, "is_prefill": True, "time_stats.attn_prefill.median": 0.3,
    "time_stats.attn_decode.median": "", "time_stats.attn_kv_cache_save.median": 0.006,
    "time_stats.attn_input_reshape.median": 0.001,
}  # fmt: skip


def written(tmp_path, *rows):
    path = tmp_path / "table.csv"
    path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
    return path


def times_us(table):
    return {str(spec): pytest.approx(us) for spec, us in zip(table.specs, table.us, strict=True)}


def test_a_layer_is_split_over_its_workers_and_its_times_are_in_ms(tmp_path):
    table = read_profile_table(written(tmp_path, LAYER))
    assert times_us(table) == {
        "embedding fp16 rows=256 length=4096": 5,
        "rms_norm fp16 rows=256 length=4096": 6,
        "gemm fp16 m=256 n=3072 k=4096 transposes=1": 50,  # 16 heads of queries, 4 of keys and 4 of values, of 128 each
        "rope fp16 rows=256 length=2560": 10,
        "gemm fp16 m=256 n=4096 k=2048 transposes=1": 40,
        "gemm fp16 m=256 n=14336 k=4096 transposes=1": 200,  # gate and up
        "silu_mul fp16 rows=256 length=7168": 9,
        "gemm fp16 m=256 n=4096 k=7168 transposes=1": 100,
        "add fp16 rows=256 length=4096": 4,
    }
    assert not table.left_out


def test_attention_of_a_chunk_sees_the_cache_and_a_decoding_step_has_one_query(tmp_path):
    decode = {**ATTENTION, "batch_size": 8, "prefill_chunk_size": 0, "kv_cache_size": 2047, "is_prefill": False,
              "time_stats.attn_prefill.median": "", "time_stats.attn_decode.median": 0.05}  # fmt: skip
    assert times_us(read_profile_table(written(tmp_path, ATTENTION, decode), precision="bf16")) == {
        "attention bf16 batch=1 heads=32 queries=512 head_dim=128 kv_heads=8 keys=1536": 300,
        "copy bf16 rows=512 length=2048": 6,
        "attention bf16 batch=8 heads=32 queries=1 head_dim=128 kv_heads=8 keys=2048": 50,
        "copy bf16 rows=8 length=2048": 6,
    }


@every_case(("time", "us"), [("us", 70.0), ("latency_ms", 70e3)])
def test_products_have_a_type_and_a_time_in_the_unit_of_its_column(tmp_path, time, us):
    row = {"M": 128, "N": 4096, "K": 1024, "dtype": "torch.bfloat16", "backend": "cutlass", time: 70}
    scaled = {**row, "dtype": "nvfp4"}
    assert times_us(read_profile_table(written(tmp_path, row, scaled))) == {
        "gemm bf16 m=128 n=4096 k=1024 transposes=1": us,
        "gemm fp4 m=128 n=4096 k=1024 transposes=1 block_scaled=1": us,
    }


def test_ops_as_text_are_what_a_device_file_has(tmp_path):
    op = OpSpec.parse("experts bf16 tokens=64 hidden=2048 inner=768 experts=128 top_k=8")
    (sample,) = read_profile_table(written(tmp_path, {"op": op, "us": 90}, {"op": op, "us": 110})).samples
    assert (OpSpec.parse(sample.op), sample.us) == (op, pytest.approx(100))


def test_unknown_columns_are_named_and_left_out(tmp_path):
    table = read_profile_table(written(tmp_path, {**LAYER, "time_stats.all_gather.median": 3.0, "note": "x"}))
    assert any("time_stats.all_gather.median, note" in reason for reason in table.left_out)
    assert len(table.specs) == 9


@every_case(
    ("row", "said"),
    [
        ({"a": 1}, "no table of ops; it needs num_tokens"),
        ({**LAYER, "n_embd": "wide"}, "line 2: could not convert"),
        ({**LAYER, "num_tokens": ""}, "line 2: num_tokens must be a number"),
        ({"m": 8, "n": 8, "k": 8, "dtype": "int3", "us": 4}, "line 2: element type 'int3' is not known"),
        ({"m": 8, "n": 8, "k": 8, "us": 4e-6}, "are the times in seconds"),
        ({"m": 8, "n": 8, "k": 8, "ms": 5e3}, "are the times in us, not in ms"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, row, said):
    with pytest.raises(InputError, match=said):
        read_profile_table(written(tmp_path, row))
