# On the GPU machine, in the copy of the project's root: unpack the parts of this call, check once that everything
# loads, and set the environment. Source it in every call: . tools/gpu/install.sh
# Unpacked files stay in $KIT while the machine is kept; a call without a part takes a second. While a part is missing,
# it ends with 3, so that `&& python3 -m tools.gpu.measure ...` does not run.
export KIT=${KIT:-/tmp/conserve-gpu}
export PYTHONPATH=$KIT/site:$KIT/meta:$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=
# There is no network, so libraries must not try it. Caches lie beside the rest, where a later start finds them.
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export VLLM_USE_FLASHINFER_SAMPLER=0  # vLLM takes FlashInfer for granted there, and does not start without it
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
export VLLM_CACHE_ROOT=$KIT/cache/vllm TORCHINDUCTOR_CACHE_DIR=$KIT/cache/inductor TRITON_CACHE_DIR=$KIT/cache/triton
mkdir -p "$KIT/meta" "$KIT/site"

python3 -m tools.gpu.unpack "$KIT" || return 3 2>/dev/null || exit 3
if [ ! -e "$KIT/.looked" ]; then
    python3 -m compileall -q -j 0 "$KIT/site" > /dev/null  # otherwise the first start of each process pays for it
    python3 -m tools.gpu.look "$KIT" 2>&1 | tee "${OUT:-$KIT}/install.txt"
    nproc; free -g | head -2; df -h "$KIT" | tail -1; nvidia-smi -L
    touch "$KIT/.looked"
fi
