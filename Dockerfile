# One image for the server and the sites of a federation: docs/containers.md.
# Build: docker build --tag apfl .      CPU only; for a GPU pass another index: --build-arg TORCH=https://download.pytorch.org/whl/cu128
FROM python:3.12.12-slim-bookworm AS build
ARG TORCH=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/apfl
ENV PATH=/opt/apfl/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
RUN pip install --index-url "$TORCH" --extra-index-url https://pypi.org/simple --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY experiments experiments
COPY src src
RUN pip install --constraint constraints.txt ".[flower,tables]" \
    && find /opt/apfl -type d -name __pycache__ -prune -exec rm -rf {} + \
    && rm -rf /opt/apfl/lib/python3.12/site-packages/torch/include /opt/apfl/lib/python3.12/site-packages/torch/test

FROM python:3.12.12-slim-bookworm
RUN groupadd --gid 10001 apfl && useradd --uid 10001 --gid apfl --create-home apfl \
    && install --directory --owner apfl --group apfl --mode 0700 \
       /srv/federation /var/lib/apfl /site-a /site-b /site-c
COPY --from=build /opt/apfl /opt/apfl
ENV PATH=/opt/apfl/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 \
    FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
USER 10001:10001
WORKDIR /home/apfl
EXPOSE 9091
VOLUME ["/srv/federation", "/var/lib/apfl"]
# A server is healthy if its port answers, a site (APFL_ROLE=site) as long as its SuperNode runs.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-m", "apfl.federate.flower.health"]
ENTRYPOINT ["apfl"]
CMD ["--help"]
