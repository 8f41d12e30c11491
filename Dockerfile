# The GPU environment, with every pin: docker build -t megagrpo .
#
# Half an hour and more: Transformer Engine and apex are compiled. Fewer kinds of GPUs make it shorter:
#   docker build --build-arg ARCHITECTURES=9.0 -t megagrpo .
# Run it with the host's shared memory and locked pages, which weight sync and NCCL use:
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit nofile=65536 --network=host megagrpo megagrpo doctor
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

# Compute capabilities: A100, L40S and RTX 40, H100 and H200, B200, RTX 50.
ARG ARCHITECTURES="8.0;8.9;9.0;10.0;12.0"
# A commit of NVIDIA/apex, which has no releases.
ARG APEX=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG JOBS=8

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap git ibverbs-providers libibverbs1 librdmacm1 libnuma1 libseccomp2 make ninja-build numactl \
        python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/megagrpo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 MAX_JOBS=$JOBS
COPY requirements/gpu.txt /tmp/gpu.txt
# torch first: what is compiled afterwards is compiled against it, so without isolation.
RUN python3 -m venv /opt/megagrpo \
    && pip install $(grep -E '^(setuptools|wheel|pybind11|torch)==' /tmp/gpu.txt) \
    && TORCH_CUDA_ARCH_LIST="$ARCHITECTURES" NVTE_FRAMEWORK=pytorch \
        pip install --no-build-isolation --no-deps -r /tmp/gpu.txt

# vLLM's pins do not go with these. This environment is the default of rollout.vllm.python.
COPY requirements/vllm_gpu.txt /tmp/vllm_gpu.txt
RUN python3 -m venv /opt/.venv-vllm && /opt/.venv-vllm/bin/pip install --no-deps -r /tmp/vllm_gpu.txt

# The apex on PyPI is another package.
RUN git init --quiet /tmp/apex && cd /tmp/apex \
    && git fetch --quiet --depth 1 https://github.com/NVIDIA/apex $APEX && git checkout --quiet FETCH_HEAD \
    && TORCH_CUDA_ARCH_LIST="$ARCHITECTURES" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation --no-deps . \
    && rm -rf /tmp/apex

COPY setup.py README.md /opt/src/
COPY megagrpo /opt/src/megagrpo
RUN pip install --no-deps --no-build-isolation /opt/src
COPY yaml_recipes /workspace/yaml_recipes
COPY examples /workspace/examples
COPY slurm /workspace/slurm
COPY tools /workspace/tools
COPY benchmarks /workspace/benchmarks
COPY Makefile /workspace/
WORKDIR /workspace
