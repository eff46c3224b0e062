"""The graph of a captured step as a model that strategies can split: `captured_model`.

`segments` cuts the forward pass at repeated modules, `regions` says which tensors tensor parallel ranks split, `blocks` makes ops
with named dims.
"""

from dpro_search.parallel.captured.build import captured_model as captured_model
