#!/bin/sh
# Checks the cuda backend on one GPU in under six minutes and prints one table.
#
#     benchmarks/gpu_check.sh                    with python3, or PYTHON=/path/to/python
#     benchmarks/gpu_check.sh --only equality    one check; --quick for fewer steps
#
# Needs Python 3.10 or newer, torch 2.11 or newer built for the GPU, attrs and numpy; pipec need not be installed.
# Exit status: 0 all checks pass, 1 one fails, 77 there is no GPU here, 2 the command was used wrongly.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} # deterministic products of matrices
export PYTHONPATH CUBLAS_WORKSPACE_CONFIG
if ! "${PYTHON:-python3}" -c 'import torch, attrs, numpy' 2> /dev/null; then
  echo "gpu_check: ${PYTHON:-python3} lacks torch, attrs or numpy; name another: PYTHON=/path/to/python $0" >&2
  exit 2
fi
exec "${PYTHON:-python3}" "$here/gpu_check.py" "$@"
