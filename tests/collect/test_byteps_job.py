"""Recording BytePS jobs: what a failed one tells."""

from dpro_search.collect.byteps_job import explained
from dpro_search.errors import JobError

TRACER = (
    "rank 1 ended with code -6: step 11 loss 0.000718 | F byteps/common/core_loops.cc:70] Check failed: "
    "task->context->part_comm_time[task->key][this_op].back()->dur == 0 tensor: byteps.gradient_296_120 task->key:31916152 type:1 "
    "'dur' has already been assigned:94767023711728"
)


def test_a_job_that_byteps_s_tracer_ended_says_what_to_do():
    assert "BYTEPS_PARTITION_BYTES" in str(explained(JobError(TRACER)))


def test_other_failures_stay_as_they_are():
    error = JobError("server0 ended with code 1: no output")
    assert explained(error) is error
