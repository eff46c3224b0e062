#!/usr/bin/env bash
# Builds the environment of a framework, apart from the core package because its pins are old.
#
#   scripts/make_env.sh tensorflow      TensorFlow 2.15.1 + Horovod 0.28.1 (Gloo and MPI)
#   scripts/make_env.sh torch           PyTorch 2.13.0 for CPU (DistributedDataParallel over Gloo)
#   scripts/make_env.sh mxnet           MXNet 1.9.1 for CPU (KVStore parameter servers) + Horovod 0.28.1 (MPI)
#   scripts/make_env.sh parallel        torchtitan, megatron-core, DeepSpeed, Accelerate, Lightning on the torch environment: they read exports, are recorded
#   scripts/make_env.sh tvm             TVM 0.27.0 for experiments/tensor_programs
#   scripts/make_env.sh synchronisation  PyTorch 2.13.0 for CPU, Ray 2.60.0 (parameter servers) and scikit-learn (data; experiments/adsp)
#   scripts/make_env.sh jax             JAX 0.10.2 for CPU: programs compiled by XLA are read as text (Apache-2.0)
#   scripts/make_env.sh jax+tpu         the same and XLA's compiler for TPUs (libtpu, 0.7 GB; Google Cloud terms); no TPU is needed to compile
#   scripts/make_env.sh jax+cuda        the same and XLA's compiler for NVIDIA GPUs (NVIDIA's terms); no GPU and no driver are needed to compile
#   scripts/make_env.sh jax+tpu+cuda    all of them; the licences are printed before anything is installed
#   scripts/make_env.sh peers           other predictors of training steps, for experiments/truth: llm-analysis, mlsysim
#
# Prints the path of the environment's Python on the last line. Idempotent: a finished environment is reused.
# The environments live outside the checkout, in $DPRO_SEARCH_ENVS (default ~/.cache/dpro-search/envs).
# Needs Python 3.11 (or 3.9-3.10); for Horovod a C++ compiler, CMake and OpenMPI (Debian: g++ cmake openmpi-bin libopenmpi-dev).
set -euo pipefail

framework=${1:?usage: scripts/make_env.sh tensorflow|torch|mxnet|synchronisation|parallel|tvm|jax[+tpu][+cuda]|peers}
root=${DPRO_SEARCH_ENVS:-$HOME/.cache/dpro-search/envs}
python=${DPRO_SEARCH_PYTHON:-python3.11}

fail() { echo "make_env: $*" >&2; exit 1; }

require_build_tools() {
    command -v cmake >/dev/null || fail "cmake is missing; install it (Debian: apt-get install cmake g++)"
    command -v g++ >/dev/null || fail "g++ is missing; install it (Debian: apt-get install g++)"
    command -v mpicxx >/dev/null || fail "OpenMPI is missing; install it (Debian: apt-get install openmpi-bin libopenmpi-dev)"
}

# Without pip's cache: a wheel there may have been built for another framework, or without MPI.
install_horovod() {
    local pip=$1 source; shift
    source=$(mktemp -d)
    "$pip" download -q --no-cache-dir --no-deps --no-build-isolation --no-binary horovod -d "$source" horovod==0.28.1
    tar -xzf "$source"/horovod-0.28.1.tar.gz -C "$source" --strip-components=1
    # An operation of MXNet is freed when its transfer is over, and Horovod then still logs the name in it: a job crashes now and then.
    sed -i 's/ops_param->op_names\[0\]/std::string(&)/' "$source/horovod/mxnet/mpi_ops.cc"
    grep -q 'std::string(ops_param->op_names\[0\])' "$source/horovod/mxnet/mpi_ops.cc" || fail "Horovod's source is not the known one"
    env HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITH_MPI=1 MAKEFLAGS=-j2 CMAKE_BUILD_PARALLEL_LEVEL=2 "$@" \
        "$pip" install -q --no-cache-dir --no-deps --no-build-isolation "$source"
    rm -rf "$source"
}

install_tensorflow() {
    require_build_tools
    "$1/bin/pip" install -q -U pip wheel "setuptools<70" packaging
    "$1/bin/pip" install -q tensorflow-cpu==2.15.1 psutil cloudpickle pyyaml cffi
    install_horovod "$1/bin/pip" HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
    "$1/bin/python" -c 'import horovod.tensorflow as hvd; assert hvd.gloo_built() and hvd.mpi_built()'
}

install_torch() {
    "$1/bin/pip" install -q -U pip
    "$1/bin/pip" install -q torch==2.13.0 numpy
    "$1/bin/python" -c 'import torch.distributed as dist; assert dist.is_gloo_available()'
}

install_synchronisation() {
    "$1/bin/pip" install -q -U pip
    "$1/bin/pip" install -q torch==2.13.0 ray==2.60.0 numpy scipy scikit-learn msgspec numba networkx
    "$1/bin/python" -c 'import ray, sklearn, torch.distributed as dist; assert dist.is_gloo_available()'
}

install_mxnet() {
    require_build_tools
    "$1/bin/pip" install -q -U pip wheel "setuptools<70"
    "$1/bin/pip" install -q mxnet==1.9.1 numpy==1.23.5
    "$1/bin/python" -c 'import mxnet; assert mxnet.runtime.Features().is_enabled("DIST_KVSTORE")'
    "$1/bin/pip" install -q --no-deps cloudpickle psutil pyyaml packaging cffi pycparser
    install_horovod "$1/bin/pip" HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_CPU_OPERATIONS=MPI
    "$1/bin/python" -c 'import horovod.mxnet as hvd; assert hvd.mpi_built()'
}

# On the packages of the torch environment, which must be there. Of torchtitan's imports Triton is 0.6 GB, and unused on a CPU.
install_parallel() {
    local torch; torch=$("$root/torch/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') ||
        fail "needs the torch environment: scripts/make_env.sh torch"
    echo "$torch" >"$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-environment.pth"
    "$1/bin/pip" install -q torchtitan==0.3.0 accelerate==1.15.0 triton==3.9.0 transformers==5.24.0 lightning==2.6.6 hjson py-cpuinfo msgpack ninja
    # Megatron-Bridge's config needs Transformer Engine, which is built for GPUs: its source is read, not imported.
    "$1/bin/pip" install -q --no-deps megatron-core==0.16.1 megatron-bridge==0.3.1 deepspeed==0.19.8
    "$1/bin/python" -c 'import torchtitan.trainer, accelerate, deepspeed.runtime.config, megatron.core.transformer'
}

# The tvm-ffi that pip resolves by default crashes.
install_tvm() {
    "$1/bin/pip" install -q -U pip
    "$1/bin/pip" install -q apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy
    "$1/bin/python" -c 'import tvm; tvm.target.Target("llvm")'
}

install_jax() {
    "$1/bin/pip" install -q -U pip
    "$1/bin/pip" install -q jax==0.10.2 numpy
    "$1/bin/python" -c 'from jax.experimental import topologies'
}

install_jax_tpu() {
    "$1/bin/pip" install -q jax==0.10.2 'libtpu==0.0.42.*'
    "$1/bin/python" -c 'import libtpu'
}

install_jax_cuda() {
    "$1/bin/pip" install -q jax==0.10.2 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
    "$1/bin/python" -c 'import jax_plugins.xla_cuda12'
}

# The core package neither contains nor depends on these: who asks for a compiler accepts its terms.
jax_licence() {
    case $1 in
        jax) echo "JAX and jaxlib 0.10.2: Apache-2.0, https://github.com/jax-ml/jax/blob/main/LICENSE" ;;
        tpu) echo "libtpu 0.0.42: Google Cloud Platform Terms of Service, https://cloud.google.com/terms" ;;
        cuda) echo "jax-cuda12-plugin and jax-cuda12-pjrt 0.10.2: Apache-2.0; nvidia-cuda-nvcc-cu12: NVIDIA's end user licence agreement," \
            "https://docs.nvidia.com/cuda/eula/" ;;
    esac
}

install_peers() {
    "$1/bin/pip" install -q llm-analysis==0.2.2 mlsysim==0.3.0
    "$1/bin/python" -c 'import llm_analysis.analysis, mlsysim'
}

compilers=()
if [[ $framework == jax+* ]]; then
    IFS=+ read -ra compilers <<<"${framework#jax+}"
    for compiler in "${compilers[@]}"; do
        [[ $compiler == tpu || $compiler == cuda ]] || fail "unknown compiler '$compiler' (known: jax+tpu, jax+cuda, jax+tpu+cuda)"
    done
    framework=jax
fi

case $framework in
    tensorflow) pins="tensorflow-cpu==2.15.1 horovod==0.28.1 gloo mpi" ;;
    torch) pins="torch==2.13.0 numpy" ;;
    synchronisation) pins="torch==2.13.0 ray==2.60.0 numpy scipy scikit-learn msgspec numba networkx" ;;
    mxnet) pins="mxnet==1.9.1 numpy==1.23.5 horovod==0.28.1 mpi, names copied" ;;
    parallel) pins="torchtitan==0.3.0 accelerate==1.15.0 megatron-core==0.16.1 megatron-bridge==0.3.1 deepspeed==0.19.8 transformers==5.24.0 lightning==2.6.6" ;;
    tvm) pins="apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1" ;;
    jax) pins="jax==0.10.2 numpy" ;;
    peers) pins="llm-analysis==0.2.2 mlsysim==0.3.0" ;;
    *) fail "unknown framework '$framework' (known: tensorflow, torch, mxnet, synchronisation, parallel, tvm, jax, peers)" ;;
esac

env=$root/$framework
stamp=$env/.dpro-search-pins
mkdir -p "$root"
exec 9>"$root/.$framework.lock"
flock 9
if [ "$(cat "$stamp" 2>/dev/null)" != "$pins" ]; then
    command -v "$python" >/dev/null || fail "$python is missing; set DPRO_SEARCH_PYTHON to a Python 3.9-3.11"
    echo "make_env: building $env (about 4 minutes)" >&2
    [ "$framework" != jax ] || echo "make_env: licence of $(jax_licence jax)" >&2
    rm -rf "$env"
    "$python" -m venv "$env"
    "install_$framework" "$env" >&2
    echo "$pins" >"$stamp"
fi
for compiler in ${compilers[@]+"${compilers[@]}"}; do
    [ ! -e "$stamp-$compiler" ] || continue
    echo "make_env: licence of $(jax_licence "$compiler")" >&2
    "install_jax_$compiler" "$env" >&2
    touch "$stamp-$compiler"
done
echo "$env/bin/python"
