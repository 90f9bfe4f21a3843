"""A Triton backend named `cpu` that compiles nothing: with it on the path, vLLM's CPU build takes Triton.

vLLM replaces Triton with placeholders where there is no GPU, unless Triton has a backend of this name
(`vllm/triton_utils/importing.py`). It then takes Model Runner V2, as on GPUs; with `TRITON_INTERPRET=1`
Triton's interpreter runs the runner's kernels. The directory above is an installed package to Python:
put it on `PYTHONPATH`.
"""
