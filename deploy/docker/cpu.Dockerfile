# NanoCP on CPUs: docker build -f deploy/docker/cpu.Dockerfile -t nanocp .
# Run it with shared memory for the exchange: docker run --shm-size 8g -p 8000:8000 -p 50051:50051 -v CHECKPOINT:/checkpoints/model nanocp
FROM python:3.11-slim-bookworm AS build
WORKDIR /build
COPY constraints.txt pyproject.toml LICENSE README.md ./
# Before the code: torch is the largest layer and changes least. The index has the CPU builds of torch alone.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/nanocp \
    && /opt/nanocp/bin/pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" torch
COPY nanocp nanocp
COPY control_plane control_plane
COPY data_plane data_plane
RUN /opt/nanocp/bin/pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" '.[serve]'

FROM python:3.11-slim-bookworm
# Instances compile their kernels with g++ when they start first; without it they take torch's, which are slower. KubeRay's
# containers call the others by name.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 nanocp
COPY --from=build /opt/nanocp /opt/nanocp
ENV PATH=/opt/nanocp/bin:$PATH RAY_USAGE_STATS_ENABLED=0
USER 1000
WORKDIR /home/nanocp
EXPOSE 8000 50051 9464
# Ctrl-C and `docker stop` let running requests end, for limits.drain_timeout_ms: docker stop --time 45.
STOPSIGNAL SIGINT
CMD ["nanocp", "serve", "/checkpoints/model", "--host", "0.0.0.0"]
