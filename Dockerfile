# docker build -t pipelinerl .                          for CPUs
# docker build -t pipelinerl --build-arg TORCH=cu130 .  for NVIDIA GPUs: a folder of https://download.pytorch.org/whl
# docker run --rm --shm-size 2g --user "$(id -u)" -v "$PWD:/work" pipelinerl train run.yaml      (GPUs: --gpus all)
FROM python:3.12-slim
ARG TORCH=cpu
ARG EXTRAS=serve,http,redis,math,lora

COPY pyproject.toml constraints.txt README.md LICENSE /opt/pipelinerl/
COPY src /opt/pipelinerl/src
WORKDIR /opt/pipelinerl
RUN pip install --no-cache-dir --constraint constraints.txt \
        --extra-index-url "https://download.pytorch.org/whl/${TORCH}" torch \
    && pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" \
    && useradd --create-home user

USER user
WORKDIR /work
ENTRYPOINT ["pipelinerl"]
CMD ["train", "--run_dir", "/tmp/demo"]
