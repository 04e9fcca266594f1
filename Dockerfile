# The environment of `make test`: the same Python, the same dependencies from pyproject.toml, no more.
#   docker build --tag sslpipe .     # of a release: --build-arg VERSION=1.2.3
#   docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" -v /data:/data sslpipe \
#     sslpipe train recipes/imagenet1k.toml --data /data/imagenet/dataset.json --run-dir /data/runs/a
# torch's wheels bring CUDA's libraries; the machine brings the driver. enroot and apptainer read the
# image for SLURM: see slurm/site.sh.
FROM python:3.11-slim-bookworm

RUN apt-get update \
 && apt-get install --yes --no-install-recommends make git \
 && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HOME=/tmp
WORKDIR /sslpipe

# dependencies first: a change of the code does not install them again
COPY pyproject.toml setup.py README.md LICENSE ./
RUN mkdir sslpipe && touch sslpipe/__init__.py \
 && pip install --upgrade pip && pip install -e ".[dev,docs,remote,trackers]"

COPY . .
# the version is that of git, which is not in the image: `sslpipe --version` says what the build was told
ARG VERSION
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SSLPIPE="$VERSION" pip install --no-deps -e .
# `make test` in the image takes the image's own Python
RUN mkdir -p .venv && ln -s /usr/local/bin .venv/bin && touch .venv/.installed

CMD ["sslpipe", "--help"]
