"""The launchers of all kinds of jobs that can be recorded; ``_base.py`` defines what a launcher is."""

from __future__ import annotations

from dpro_search.collect.launchers._base import LaunchedJob as LaunchedJob
from dpro_search.collect.launchers._base import Launcher as Launcher
from dpro_search.collect.launchers.horovod import MXNET_HOROVOD as MXNET_HOROVOD
from dpro_search.collect.launchers.horovod import TENSORFLOW_HOROVOD as TENSORFLOW_HOROVOD
from dpro_search.collect.launchers.ps_lite import MXNET_BYTEPS as MXNET_BYTEPS
from dpro_search.collect.launchers.ps_lite import MXNET_KVSTORE as MXNET_KVSTORE
from dpro_search.collect.launchers.torch import PYTORCH_DDP as PYTORCH_DDP
from dpro_search.collect.launchers.torch import PYTORCH_FSDP as PYTORCH_FSDP
