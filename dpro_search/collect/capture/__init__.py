"""The training step of a model, captured without running it: ops, tensors and collectives as PyTorch would issue them.

`capture` runs `runtime/capture/dpro_search_capture.py` in an environment with PyTorch; `read_graph` reads what it wrote.
"""

from dpro_search.collect.capture.graph_file import CapturedGraph as CapturedGraph
from dpro_search.collect.capture.graph_file import CapturedOp as CapturedOp
from dpro_search.collect.capture.graph_file import CapturedStep as CapturedStep
from dpro_search.collect.capture.graph_file import CapturedTensor as CapturedTensor
from dpro_search.collect.capture.graph_file import IssuedCollective as IssuedCollective
from dpro_search.collect.capture.graph_file import StepPhase as StepPhase
from dpro_search.collect.capture.graph_file import read_graph as read_graph
from dpro_search.collect.capture.graph_file import written_graph as written_graph
