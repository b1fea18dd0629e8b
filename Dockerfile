# offbeat and its engine, as a user without rights:
#   docker build -t offbeat .                            for CPUs
#   docker build -t offbeat --build-arg EXTRAS=cuda .    for NVIDIA GPUs (driver R580 or newer)
# Code and data of yours are found in /work: FROM offbeat, COPY rewards.py data.jsonl ./
ARG BASE=docker.io/library/python:3.11-slim
FROM $BASE

# The extras of pyproject.toml to install, the engine's among them: cpu or cuda, as in "cuda,lora,mcp".
ARG EXTRAS=cpu
# PyPI has torch for CUDA only.
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu

# vLLM needs libnuma on a CPU; on a GPU Triton compiles with gcc.
RUN case $EXTRAS in *cuda*) packages="gcc libc6-dev" ;; *) packages=libnuma1 ;; esac \
    && apt-get update -q \
    && apt-get install -q -y --no-install-recommends $packages \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*.log \
    && useradd --uid 1000 --no-create-home --home-dir /tmp offbeat

COPY . /usr/src/offbeat
# torchvision and its like are broken beside a torch for CPUs (see ./dev).
RUN cd /usr/src/offbeat \
    && case $EXTRAS in *cuda*) ;; *) export PIP_EXTRA_INDEX_URL="$CPU_TORCH_INDEX ${PIP_EXTRA_INDEX_URL:-}" ;; esac \
    && python3 -m venv /opt/offbeat \
    && /opt/offbeat/bin/pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]" \
    && case $EXTRAS in *cuda*) ;; *) /opt/offbeat/bin/pip uninstall -q -y torchvision torchaudio torchcodec ;; esac \
    && rm -rf /usr/src/offbeat

ENV PATH=/opt/offbeat/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["offbeat"]
