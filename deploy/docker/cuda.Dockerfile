# NanoCP on NVIDIA GPUs: docker build -f deploy/docker/cuda.Dockerfile -t nanocp:cuda .
# docker run --gpus all --ipc host --ulimit memlock=-1 -p 8000:8000 -p 50051:50051 -v CHECKPOINT:/checkpoints/model nanocp:cuda
# CUDA's libraries come with torch, the driver with the NVIDIA container runtime.
FROM python:3.11-slim-bookworm AS build
WORKDIR /build
COPY constraints.txt pyproject.toml LICENSE README.md ./
# Before the code: torch is the largest layer and changes least. PyPI's builds are for CUDA.
RUN python -m venv /opt/nanocp \
    && /opt/nanocp/bin/pip install --no-cache-dir -c constraints.txt torch
COPY nanocp nanocp
COPY control_plane control_plane
COPY data_plane data_plane
# For several nodes of GPUs: serve,gpu,nvshmem (deploy/k8s/gpu.yaml).
ARG EXTRAS=serve,gpu
RUN /opt/nanocp/bin/pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

FROM python:3.11-slim-bookworm
# Triton compiles its launchers with gcc. KubeRay's containers call the others by name.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 nanocp
COPY --from=build /opt/nanocp /opt/nanocp
ENV PATH=/opt/nanocp/bin:$PATH RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/nanocp
EXPOSE 8000 50051 9464
# Ctrl-C and `docker stop` let running requests end, for limits.drain_timeout_ms: docker stop --time 45.
STOPSIGNAL SIGINT
CMD ["nanocp", "serve", "/checkpoints/model", "--host", "0.0.0.0"]
