# docker build -t nanoverl . && docker run --gpus all --ipc=host -it nanoverl bash run.sh
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends git python3 python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY . .
RUN GPU=1 bash run.sh setup
