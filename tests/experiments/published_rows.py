"""Rows of published runs, as the tests of `experiments.truth` write them."""

from experiments.truth.rows import Row

HEAD = (
    "source,gpu,gpus_per_node,n_gpus,model,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,precision,dp,tp,pp,micro_batch,"
    "global_batch,framework,status,step_time_s,tier,memory_gb"
)
RUN = "{source},H100,8,8,llama,32,4096,32,8,14336,128256,4096,bf16,8,1,1,1,64,NeMo,{status},{seconds},A,{memory}"


def row(**values: object) -> Row:
    """A measured run of tier A that takes a second, with some more cells; all others are blank."""
    return Row({name: str(value) for name, value in {"status": "ok", "tier": "A", "step_time_s": 1, **values}.items()})


def row_of(**values: str) -> Row:
    """A run of Llama 3 8B on eight H100 with some cells changed."""
    names, cells = HEAD.split(","), RUN.format(source="one", status="ok", seconds=4, memory=60).split(",")
    return Row({**dict(zip(names, cells, strict=True)), **values})
