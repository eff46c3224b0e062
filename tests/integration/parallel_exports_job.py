"""What frameworks make of exports: `python parallel_exports_job.py FOLDER` prints JSON; FOLDER has a folder for each export."""

import ast
import contextlib
import importlib.util
import json
import os
import sys
from dataclasses import fields
from pathlib import Path


def torchtitan(folder):
    """The configuration that its own manager makes of the recipe, and the mesh that its dimensions allow."""
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims

    sys.path.insert(0, str(folder))
    try:
        words = ["--module", "torchtitan_plan", "--config", "planned", "--training.steps", "7", "--metrics.log_freq", "1"]
        config = ConfigManager().parse_args(words)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("torchtitan_plan")
    parallelism = config.parallelism
    ranks = json.loads((folder / "ranks.json").read_text())
    dims = ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        world_size=ranks,
    )
    parts = parallelism.module_fqns_per_model_part or []
    return {
        "type": type(config).__qualname__,
        "short": [config.training.steps, config.metrics.log_freq],  # as `measure_torchrun.sh` has it
        "ranks": dims.world_size,
        "tp": parallelism.tensor_parallel_degree,
        "reshard": parallelism.fsdp_reshard_after_forward,
        "schedule": parallelism.pipeline_parallel_schedule,
        "layers": [sum(name.startswith("layers.") for name in part) for part in parts],
        "recompute": type(config.activation_checkpoint).__qualname__,
        "batch": [config.training.local_batch_size, config.training.global_batch_size, config.training.seq_len],
    }


def megatron(folder):
    """Megatron-Core's classes with the settings that the arguments name; arguments of others are in `rest`."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    words = json.loads((folder / "megatron_arguments.json").read_text())
    named = {}
    for number, word in enumerate(words):
        if word.startswith("--"):
            following = words[number + 1] if number + 1 < len(words) and not words[number + 1].startswith("--") else True
            named[word[2:].replace("-", "_")] = (
                int(following) if str(following).isdecimal() and following is not True else following
            )
    model, ddp = ({each.name for each in fields(kind)} for kind in (TransformerConfig, DistributedDataParallelConfig))
    stages = named.pop("num_virtual_stages_per_pipeline_rank", None)
    config = TransformerConfig(
        num_layers=json.loads((folder / "layers.json").read_text()),
        hidden_size=64,
        num_attention_heads=8,
        virtual_pipeline_model_parallel_size=stages,
        **({"pipeline_dtype": __import__("torch").bfloat16} if named["pipeline_model_parallel_size"] > 1 else {}),
        **{name: value for name, value in named.items() if name in model},
    )
    other = DistributedDataParallelConfig(**{name: value for name, value in named.items() if name in ddp})
    layout = config.pipeline_model_parallel_layout
    return {
        "tp": config.tensor_model_parallel_size,
        "virtual": config.virtual_pipeline_model_parallel_size,
        "layout": None if layout is None else layout.pipeline_model_parallel_size,
        "zero": other.use_distributed_optimizer,
        "rest": sorted({*named} - model - ddp),
    }


def bridge(folder):
    """Settings that no class of Megatron-Bridge or Megatron-Core has; its own classes need Transformer Engine, and are read."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    origin = Path(next(iter(importlib.util.find_spec("megatron.bridge").submodule_search_locations)))
    tree = ast.parse((origin / "training" / "config.py").read_text())
    classes = {
        each.name: {line.target.id for line in each.body if isinstance(line, ast.AnnAssign)}
        for each in tree.body
        if isinstance(each, ast.ClassDef)
    }
    provider = (origin / "models" / "gpt_provider.py").read_text()
    known = {
        "model": {each.name for each in fields(TransformerConfig)} | ({"seq_length"} if "seq_length: int" in provider else set()),
        "ddp": {each.name for each in fields(DistributedDataParallelConfig)},
        "optimizer": {each.name for each in fields(OptimizerConfig)},
        "train": classes["TrainingConfig"],
    }
    places = [line.partition("=")[0] for line in (folder / "megatron_bridge_overrides.txt").read_text().splitlines()]
    container = classes["ConfigContainer"]
    unknown = []
    for place in places:
        section, _, name = place.partition(".")
        if section not in container or (name and name not in known[section]):
            unknown.append(place)
    return {"unknown": unknown, "places": len(places)}


def deepspeed(folder):
    """DeepSpeed's own reading of the file, as on as many ranks as train replicas."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    comm.get_rank = lambda: 0  # else it takes one rank for all

    class Mpu:
        def get_data_parallel_world_size(self):
            return json.loads((folder / "ranks.json").read_text())

    config = DeepSpeedConfig(str(folder / "deepspeed.json"), mpu=Mpu())
    return {
        "batch": [config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps],
        "zero": config.zero_config.stage,
        "tp": config.tensor_parallel_config.autotp_size,
        "bf16": config.bfloat16_config.enabled,
    }


def accelerate(folder):
    """The variables that `accelerate launch` would start ranks with, and the plugins that `Accelerator` makes of them."""
    from accelerate import ParallelismConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", str(folder / "accelerate.yaml"), "train.py"])
    args, _, _ = _validate_launch_command(args)
    megatron_options = {name: value for name, value in vars(args).items() if name.startswith("megatron_lm_") and value is not None}
    if args.use_megatron_lm:
        return {
            "type": "megatron",
            "tp": megatron_options["megatron_lm_tp_degree"],
            "pp": megatron_options["megatron_lm_pp_degree"],
        }
    os.environ.update(prepare_multi_gpu_env(args))
    parallelism, plugin = ParallelismConfig(), FullyShardedDataParallelPlugin()
    return {
        "type": "fsdp" if args.use_fsdp else "ddp",
        "sizes": [parallelism.dp_replicate_size, parallelism.dp_shard_size, parallelism.tp_size, parallelism.cp_size],
        "version": plugin.fsdp_version,
        "reshard": plugin.reshard_after_forward,
        "recompute": plugin.activation_checkpointing,
    }


def main():
    readers = {"torchtitan": torchtitan, "megatron": megatron, "megatron-bridge": bridge, "deepspeed": deepspeed}
    readers["accelerate"] = accelerate
    results = {}
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        with contextlib.redirect_stdout(sys.stderr):
            try:
                results[folder.name] = readers[folder.name.partition(" ")[0]](folder)
            except (Exception, SystemExit) as error:  # of any framework; the test that needs it says which
                results[folder.name] = {"error": repr(error)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
