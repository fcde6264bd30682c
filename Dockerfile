# docker build --target cpu -t blocktune:cpu .    predicts, merges, freezes, and drives a cluster
# docker build --target gpu -t blocktune:gpu .    measures; the host brings the driver
# docker build --target dev .                     what .devcontainer uses: `make` sets up the rest
FROM python:3.11-slim AS base
# Triton compiles a launcher for each kernel with the C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .

FROM base AS dev
RUN apt-get update && apt-get install -y --no-install-recommends chromium git make && rm -rf /var/lib/apt/lists/*

FROM base AS cpu
RUN pip install --no-cache-dir --no-deps -c constraints-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --no-cache-dir -c constraints-cpu.txt ".[ray,sign,tune,ui]" "psycopg[binary]>=3.1"
WORKDIR /work
# Ray has a command `tune` of its own, and replaces ours.
ENTRYPOINT ["blocktune"]

FROM base AS gpu
RUN pip install --no-cache-dir ".[ray,tune,ui]" "psycopg[binary]>=3.1"
WORKDIR /work
# Ray's operators and schedulers start the container with commands of their own.
CMD ["blocktune", "doctor"]
