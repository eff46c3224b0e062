"""A setting of DistributedDataParallel is added in three files, and every verb knows it."""

import subprocess
import sys
from pathlib import Path

import dpro_search
from tests.recordings import trace_of

ADDED = {
    # Its type, and its value in a few words.
    "dpro_search/space/schemes.py": {
        "    static_graph: bool | None = None\n\n    title": "    static_graph: bool | None = None\n"
        "    short_forward: bool | None = None\n\n    title",
        '        "static_graph": lambda value: "static graph"': '        "short_forward": lambda value: "short forward pass",\n'
        '        "static_graph": lambda value: "static graph"',
    },
    # Its values, from which samplers choose.
    "dpro_search/space/transformations/buckets.py": {
        "class BucketViews(Switch):": 'class ShortForward(Switch):\n    """The forward pass takes half of its time."""\n\n'
        '    name = "short-forward"\n    fields = ("short_forward",)\n    turned = True\n\n\nclass BucketViews(Switch):',
    },
    # Which jobs have it, and what it changes.
    "dpro_search/kinds/ddp/job.py": {
        "from functools import cached_property\n": "from dataclasses import replace\nfrom functools import cached_property\n",
        "from dpro_search.space.transformations import (": "from dpro_search.space.transformations.buckets import ShortForward\n"
        "from dpro_search.space.transformations import (",
        '"gradient_as_bucket_view", "compression")\n    core_times': '"gradient_as_bucket_view", "compression", "short_forward")\n'
        "    core_times",
        "        if \"recomputation\" in compute:\n            transformations.append(": "        transformations.append("
        "ShortForward(self._facts))\n        if \"recomputation\" in compute:\n            transformations.append(",
        "        if plan.bfloat16_modules:\n            graph = in_bfloat16(": "        if DdpSettings.of(plan).short_forward:\n"
        "            graph = replace(graph, ready_us=graph.ready_us / 2, backward_us=graph.backward_us / 2)\n"
        "        if plan.bfloat16_modules:\n            graph = in_bfloat16(",
    },
}  # fmt: skip


def test_a_new_setting_touches_three_files(tmp_path: Path) -> None:
    package = Path(dpro_search.__file__).parent.parent
    for name, changes in ADDED.items():
        source = (package / name).read_text()
        for before, after in changes.items():
            assert source.count(before) == 1, f"{name}: {before}"
            source = source.replace(before, after)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    trace_of("ddp_mlp").save(tmp_path / "T")
    script = Path(__file__).with_name("new_ddp_setting.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(tmp_path / "T")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
