# `make demo` and `make test` set up everything that they need with pip alone.
PYTHON ?= python3.11
# an environment a Python: .venv of the default one, .venv-python3.13 of `make test PYTHON=python3.13`
VENV := .venv$(if $(filter-out python3.11,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
RUN := $(VENV)/bin
# test files side by side, three on two cores, as many wait for processes that they started; those of
# one file stay together, as they share what they set up
SIDE_BY_SIDE := -n 3 --dist loadfile
OUT ?= out/demo$(if $(SHORT),-short)
# SHORT=1: a demo of about a minute, for a first look and for CI; its numbers mean nothing
STEPS := $(if $(SHORT),steps=40 optim.warmup_steps=10 run.monitor_steps=20)
DEMO := recipes/demo.toml --data $(OUT)/data/dataset.json
TRAIN_DEMO := OMP_NUM_THREADS=1 $(RUN)/accelerate launch --config_file launch/cpu2.yaml -m sslpipe train $(DEMO)

# how far `make test-slow` goes: random kills, damaged inputs for each reader
KILLS ?= 6
FUZZ ?= 1000
SLOW := KILLS=$(KILLS) FUZZ=$(FUZZ) OMP_NUM_THREADS=1 $(RUN)/python -m pytest -m "slow or slurm"
# only the files with such a test, here and below: to collect the others takes longer than some tests
SLOW_FILES = $$(grep -rlE 'mark\.(slow|slurm)' tests --include='test_*.py' | grep -v test_kills)

# NO_INSTALL=1: no environment and no registry. $(PYTHON), 3.11 or newer, has torch >= 2.11, torchvision,
# accelerate, timm, safetensors, huggingface-hub, numpy, pillow and scikit-learn (their wheels are large, or
# come with torch's image) and what these need; out/gpu-wheels has the rest, unpacked into out/gpu-site
ifdef NO_INSTALL
GPU_READY := out/gpu-site
GPU_PYTHON := PYTHONPATH=$(CURDIR):$(CURDIR)/out/gpu-site$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
else
GPU_READY := $(VENV)/.installed
GPU_PYTHON := $(RUN)/python
endif
# those files import what may not be there, too
GPU_TEST = $(GPU_PYTHON) -m pytest -m gpu -p no:cacheprovider -W default $$(grep -rlE 'mark\.gpu' tests --include='*.py')
GPU_BENCH = $(GPU_PYTHON) -m benchmarks.gpu $(PARTS) --json out/gpu.json

# of the machine that has the GPU: Linux on x86-64
PYTHON_VERSION ?= 3.12
WHEELS = --only-binary=:all: --implementation cp --python-version $(PYTHON_VERSION) --dest out/gpu-wheels \
  $(foreach glibc,2_28 2_27 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64

# its notice about other generators, at each build
MKDOCS = NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs

.PHONY: demo test test-without test-slow test-full test-gpu test-wheel test-oldest gpu gpu-bench gpu-wheels check docs dist address bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --upgrade pip
	$(RUN)/pip install --quiet -e ".[dev,docs]"
	touch $@

demo: export SSLPIPE_NEXT = 0
demo: $(VENV)/.installed  ## shards -> pretraining on two processes -> evaluation -> export -> report
	$(RUN)/python -m tools.datasets.scattered_idx assets/fashion-mnist-10k $(OUT)/images
	$(RUN)/sslpipe shards build $(OUT)/data --source idx --root $(OUT)/images --test-fraction 0.2 --name "scattered Fashion-MNIST"
	$(RUN)/sslpipe preview $(DEMO) --out $(OUT)/run/views.png
	$(RUN)/sslpipe check $(DEMO) $(STEPS)
	$(TRAIN_DEMO) --run-dir $(OUT)/run $(STEPS)
	$(RUN)/sslpipe embed $(OUT)/run --data $(OUT)/data/dataset.json --split train --split test --out '$(OUT)/run/features/{split}.safetensors'
	$(RUN)/sslpipe evaluate suite $(OUT)/run --data $(OUT)/data/dataset.json --out $(OUT)/run/eval.json
	$(RUN)/sslpipe export $(OUT)/run --out $(OUT)/backbone --format all --overwrite
	$(RUN)/sslpipe report $(OUT)/run --data $(OUT)/data/dataset.json

test: $(VENV)/.installed  ## all quick tests, minutes on 2 cores; most of their time is that of processes they start
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest $(SIDE_BY_SIDE)

test-without: $(VENV)/.installed  ## the core's quick tests after a folder that can be deleted is: SATELLITE=curate
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.helpers.without $(SATELLITE) out/without-$(SATELLITE) $(SIDE_BY_SIDE)

test-slow: $(VENV)/.installed  ## random kills, fuzzing, full disks, a real SLURM where it is installed and the user is root
	$(SLOW) $(SIDE_BY_SIDE) $(SLOW_FILES) # SLURM's jobs wait most of the time
	$(SLOW) tests/test_kills.py # alone: it looks for what a kill leaves on the machine

test-full: $(VENV)/.installed  ## the same with 50 kills and 10,000 inputs a reader; writes docs/measured/test-full.json
	rm -rf out/test-full && mkdir -p out/test-full
	SSLPIPE_TEST_RECORD=$(CURDIR)/out/test-full $(MAKE) test-slow KILLS=50 FUZZ=10000
	$(RUN)/python -m tests.helpers.record out/test-full docs/measured/test-full.json

test-gpu: $(GPU_READY)  ## what needs a CUDA device is right; says what it skips without one
	$(GPU_TEST)

gpu-bench: $(GPU_READY)  ## one GPU measured, PARTS="knn views" or all: a table and out/gpu.json
	$(GPU_BENCH)

gpu: $(GPU_READY)  ## the GPU pass, under 20 minutes: tests, then measurements, also where a test fails
	status=0; $(GPU_TEST) || status=1; $(GPU_BENCH) || status=1; exit $$status

gpu-wheels:  ## for a machine with torch and no registry: 68 MB of wheels in out/gpu-wheels
	rm -rf out/gpu-wheels
	$(PYTHON) -m pip download --quiet $(WHEELS) pydantic typer rich fsspec filelock lazy-loader pytest pytest-timeout
	$(PYTHON) -m pip download --quiet --no-deps $(WHEELS) kornia kornia_rs webdataset braceexpand simplejpeg pyarrow lightly lightning-utilities

.PHONY: out/gpu-site
out/gpu-site:
	$(PYTHON) -m benchmarks.gpu.wheels out/gpu-wheels out/gpu-site

test-wheel: dist  ## the wheel of `make dist` in an empty environment, without a clone: images to a gallery
	rm -rf out/wheel && mkdir -p out/wheel/empty
	$(PYTHON) -m venv out/wheel/venv
	out/wheel/venv/bin/pip install --quiet dist/*.whl
	cp tests/helpers/wheel_smoke.py out/wheel/empty
	cd out/wheel/empty && OMP_NUM_THREADS=1 ../venv/bin/python -P wheel_smoke.py ../venv/bin/sslpipe

test-oldest: pyproject.toml  ## the quick tests with the lowest version of every direct dependency
	$(PYTHON) -m venv out/oldest
	$(PYTHON) -m tests.helpers.lowest >out/oldest/lowest.txt
	out/oldest/bin/pip install --quiet -r out/oldest/lowest.txt "setuptools==77.*" # for the plug-in that tests install
	out/oldest/bin/pip install --quiet --no-deps -e .
	OMP_NUM_THREADS=1 out/oldest/bin/python -m pytest $(SIDE_BY_SIDE)

check: $(VENV)/.installed  ## everything that must be clean before a commit
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(MKDOCS) build --quiet
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest $(SIDE_BY_SIDE)

docs: $(VENV)/.installed  ## the site, strictly: out/site; OPEN=1 serves it at http://127.0.0.1:8000
	$(MKDOCS) $(if $(OPEN),serve,build)

# in a small environment of its own: neither build nor checks import torch
dist:  ## sdist and wheel in dist/, checked as a registry would; of a tagged commit, that it may be released
	rm -rf dist out/release
	$(PYTHON) -m venv out/release
	out/release/bin/pip install --quiet --upgrade pip
	out/release/bin/pip install --quiet --group release
	out/release/bin/python -m build
	out/release/bin/twine check --strict dist/*
	out/release/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m tests.helpers.release check dist

address:  ## URL=https://...: the repository's address, in each file that names it
	$(PYTHON) -m tests.helpers.release address "$(URL)"

bench: $(VENV)/.installed  ## ours against the peers, which the extra `bench` installs
	$(RUN)/pip install --quiet -e ".[bench]"
	$(RUN)/python -m benchmarks.nt_xent
	$(RUN)/python -m benchmarks.views
	$(RUN)/python -m benchmarks.step
	$(RUN)/python -m benchmarks.evaluation

clean:  ## the demo's output, not the environment
	rm -rf out
