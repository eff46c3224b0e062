"""Costs of a described job's step: how ops of a strategy are split, what ranks exchange, and what both take.

`compile_block` compares the layouts that ops need with those that tensors have, and makes of each mismatch a collective (Duan et
al., "Proteus", TPDS 2024, section 4). `step_costs` prices the result.
"""
