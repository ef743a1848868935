"""Words that people bring from Slurm, task-spooler, canhazgpu, docker and the shell, and what they are called here."""

from __future__ import annotations

from typing import Final

_COMMANDS: Final = {
    "squeue qstat bjobs ps ls list leases": "`gpu-pool jobs` lists what you run and wait for, `jobs --all` that of all users",
    "sinfo stat gpustat": "`gpu-pool status` shows every GPU, and who waits",
    "queue q": "`gpu-pool status` shows who waits",
    "sbatch qsub bsub ts tsp": "`gpu-pool submit -- CMD` runs a command in the background",
    "srun wait": "`gpu-pool run -- CMD` waits for GPUs and runs a command on them",
    "salloc": "`gpu-pool shell` gives you a shell with GPUs",
    "scancel qdel bkill kill rm del abort": "`gpu-pool cancel ID` stops a job, a run or a waiting request",
    "stop": "`gpu-pool cancel ID` stops a job; `gpu-pool serve` is stopped by Ctrl-C, or by systemctl",
    "sacct usage": "`gpu-pool history` shows what has ended, `gpu-pool report` adds up GPU-hours",
    "scontrol": "`gpu-pool jobs hold|release|edit ID` changes a job, `gpu-pool drain GPU` takes a GPU out of service",
    "sprio why": "`gpu-pool explain` says why your requests wait",
    "info show": "`gpu-pool status` shows every GPU, `gpu-pool explain ID` one lease or job",
    "reservations": "`gpu-pool reserve` without options lists bookings and planned drains",
    "book": "`gpu-pool reserve --at 09:00 --for 4h --gpus 2` books GPUs",
    "start server up": "`gpu-pool serve` starts a server, `gpu-pool run -- CMD` a command",
    "log cat output": "`gpu-pool logs ID` prints what a job wrote",
    "tail": "`gpu-pool logs -f ID` follows what a job writes",
    "watch nvitop": "`gpu-pool top` follows the pool",
    "free": "`gpu-pool status` shows which GPUs are free, `gpu-pool cancel ID` releases yours",
    "whoami": "`gpu-pool doctor` says who you are to each server",
    "ping check config": "`gpu-pool doctor` checks the settings and the servers",
}
_OPTIONS: Final = {
    "--gres --gpus-per-node --gpus-per-task --num-gpus --ngpus -G": "write --gpus 2",
    "--gpu-ids": "write --gpu 2,3 for certain GPUs, or --gpus 2 for any two",
    "--job-name -J -L": "write --name TEXT",
    "--mem": "--memory 12GB shares a GPU; the memory of the machine is not handed out",
    "--mem-per-gpu --gpu-memory": "write --memory 12GB, which shares a GPU",
    "--time-limit -t": "write --time 2h",
    "--duration": "write --time 2h, and --for 2h with reserve",
    "--no-wait": "write --timeout 0, which asks once",
    "--nice": "write --priority -5",
    "--qos": "write --priority NUMBER, or --preemptible",
    "--dependency -d -D": "write submit --after ID",
    "--partition": "there are no partitions; --model A100 asks for a kind of GPU",
    "--constraint --gpu-type": "write --model A100",
    "--nodelist -w --host --server --url": "write --endpoint URL for another server",
    "--user -u": "the server knows who you are; --mine shows only what is yours",
    "--me": "write --mine",
    "--all": "all is what is shown without --mine",
    "--output": "`gpu-pool logs ID` prints what a job wrote",
    "--wrap": "write the command after --",
    "--cpus-per-task": "processors are not handed out",
    "--reservation": "a booking is used by its owner without an option",
    "--exclusive": "a GPU is exclusive unless --memory is given",
    "--follow": "write logs -f",
    "--interactive": "`gpu-pool shell` gives you a shell with GPUs",
    "--pty": "leave it out: run uses your terminal",
    "--watch": "`gpu-pool status --watch` follows the pool",
}


def hint_for(word: str) -> str | None:
    """What to type instead of a command or an option of another tool; None for a word of none."""
    return next((hint for words, hint in (_COMMANDS | _OPTIONS).items() if word in words.split()), None)
