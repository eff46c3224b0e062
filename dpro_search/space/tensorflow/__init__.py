"""TensorFlow and MXNet jobs with Horovod: groupings of tensors, the job under a plan, and the recorded step op by op."""
