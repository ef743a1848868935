# What bash reads at the start of `gpu-pool shell`: the user's own file, and the GPUs before their prompt.
[ -r ~/.bashrc ] && . ~/.bashrc
PS1='(gpu $GPU_POOL_LEASE_GPUS) '"${PS1:-\\$ }"
