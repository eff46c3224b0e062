"""Flags of the compiler and choices of attention and embedding, as the published runs' own scripts have them.

Sources: MaxText, benchmarks/xla_flags_library.py and maxtext_trillium_model_configs.py (Trillium), src/maxtext/configs/tpu/v5p/*.sh
and v4/*.sh (the scripts that the tables of v5p and v4 name), base.yml (all that a script does not set). Flags that move collectives
to the SparseCores, and those of the service around the compiler, are left out: libtpu compiles for the TensorCore here.
"""

from __future__ import annotations

from dataclasses import dataclass

VMEM = "--xla_tpu_scoped_vmem_limit_kib=98304"
SCATTER_LAYOUT = (
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true --xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 "
    "--xla_tpu_assign_all_reduce_scatter_layout=true"
)
DATA_PARALLEL_OVERLAP = "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true"
GATHER_FUSION = (
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true"
)
HOST_OFFLOAD = (
    "--xla_tpu_enable_all_experimental_scheduler_features=true --xla_tpu_enable_scheduler_memory_pressure_tracking=true "
    "--xla_tpu_host_transfer_overlap_limit=24 --xla_tpu_aggressive_opt_barrier_removal=ENABLED "
    "--xla_lhs_prioritize_async_depth_over_stall=ENABLED --xla_tpu_enable_ag_backward_pipelining=true "
    "--xla_should_allow_loop_variant_parameter_in_chain=ENABLED --xla_should_add_loop_invariant_op_in_chain=ENABLED "
    "--xla_max_concurrent_host_send_recv=100 --xla_tpu_scheduler_percent_shared_memory_limit=100 "
    "--xla_latency_hiding_scheduler_rerun=2"
)
NO_COLLECTIVE_MATMUL = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
V5P = (
    "--xla_tpu_megacore_fusion_allow_ags=false --xla_enable_async_collective_permute=true "
    f"--xla_tpu_enable_ag_backward_pipelining=true {DATA_PARALLEL_OVERLAP} {GATHER_FUSION}"
)
V4 = "--xla_enable_async_all_gather=true"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a run beside its model and mesh.

    Attributes
    ----------
    flags
        Of libtpu (``LIBTPU_INIT_ARGS``).
    block, fused
        Rows and columns of the attention kernel's blocks (sa_block_q ...), and whether one kernel does the whole backward pass
        (sa_use_fused_bwd_kernel).
    iota_embed
        MaxText's use_iota_embed.
    bf16_weights
        MaxText's weight_dtype is bfloat16.
    """

    flags: str
    block: int = 512
    fused: bool = False
    iota_embed: bool = True
    bf16_weights: bool = False


def recipe_of(source: str, model: str, chips: int, batch: int) -> Recipe:
    """The recipe of a published run, by its table, its model, the chips of a slice, and the sequences of a chip."""
    if source == "maxtext-readme-v4":
        return Recipe(flags=V4, iota_embed=False)
    if source != "tpu-recipes-trillium":
        return Recipe(flags=V5P)
    offloading = f"{VMEM} {SCATTER_LAYOUT} {DATA_PARALLEL_OVERLAP} {GATHER_FUSION} {HOST_OFFLOAD}"
    if model.startswith("llama3.1-8b") or model.startswith("mistral"):
        separate = batch == 3 or model.startswith("mistral")
        return Recipe(flags=f"{offloading} {NO_COLLECTIVE_MATMUL}" if separate else offloading, block=2048, fused=True)
    if model.startswith("llama3.1-70b"):
        small = chips == 32
        flags = f"{offloading} {NO_COLLECTIVE_MATMUL}" if small else offloading
        return Recipe(flags=flags, block=2048, fused=True, bf16_weights=small)
    if model.startswith("llama3.1-405b"):
        return Recipe(flags=f"{VMEM} {GATHER_FUSION} {HOST_OFFLOAD}", block=1024)
    if model.startswith("gemma3"):
        return Recipe(flags=f"{VMEM} {SCATTER_LAYOUT} {GATHER_FUSION}", block=2048)
    return Recipe(flags=f"{VMEM} {GATHER_FUSION}", block=1024)
