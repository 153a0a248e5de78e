#!/bin/sh
# Times, launches and memory on one GPU, of some minutes a host. Not run yet since the readout has its own kernels.
#
#   sh benchmarks/gpu.sh mace        # in the MACE environment
#   sh benchmarks/gpu.sh nequip      # in the NequIP environment
#
# Writes runs/gpu_HOST*.json. A failure of one step does not keep the others from running.
host=${1:?mace or nequip}
cd "$(dirname "$0")/.." || exit 1
failed=0
step() { echo "== $*"; "$@" || failed=1; }
measure() { step python benchmarks/hosts.py --host "$host" --device cuda --rounds 40 --seconds 12 "$@"; }

# The trial of every kernel on this device.
step python -m pytest -q -p no:cacheprovider tests/core/readout/kernels tests/core/maths/kernels/test_triton.py -k gpu
measure --systems 21,192 --out "runs/gpu_$host.json"
measure --systems 1500,10002 --tasks inference --no-committee --out "runs/gpu_${host}_large.json"
# Beside the path without these kernels.
export E2IP_KERNEL=eager
measure --systems 21,192 --tasks inference --no-committee --no-memory --out "runs/gpu_${host}_eager.json"
if [ "$host" = nequip ]; then
  for kernel in auto triton; do
    export E2IP_KERNEL=$kernel
    measure --modes compile,aoti --systems 21,192 --no-committee --no-memory --out "runs/gpu_nequip_compiled_$kernel.json"
  done
fi
exit $failed
