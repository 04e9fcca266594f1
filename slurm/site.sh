# What differs from site to site, in one place. Read by every script here; edit it, or set the
# variables before sbatch. `sslpipe slurm` copies it into the script that it prints.

# The clone that holds this folder: the one sbatch was called in, unless told otherwise.
SSLPIPE_ROOT=${SSLPIPE_ROOT:-$SLURM_SUBMIT_DIR}
# Its Python environment (`make .venv/.installed` makes one), on a file system that all nodes see.
SSLPIPE_VENV=${SSLPIPE_VENV:-$SSLPIPE_ROOT/.venv}
export PATH=$SSLPIPE_VENV/bin:$PATH
# module load cuda/13.0

# Processes a node: one a GPU where the job has GPUs, else this many.
SSLPIPE_CPU_PROCESSES=${SSLPIPE_CPU_PROCESSES:-1}

# Starts that may follow one another without a new checkpoint before the job gives up.
SSLPIPE_MAX_IDLE_STARTS=${SSLPIPE_MAX_IDLE_STARTS:-3}

# Options of every srun, and words before the program: a container, say.
#   pyxis:      srun_options=(--container-image=/images/sslpipe.sqsh --container-mounts=/data,"$SSLPIPE_ROOT")
#   apptainer:  inside=(apptainer exec --nv --bind /data /images/sslpipe.sif)
srun_options=(--kill-on-bad-exit=1)
inside=()

# Threads of each process outside torch's own, and the network to use where there are several.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=eth0
# A hung NCCL collective ends the job and leaves its history.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000

# How long the launcher waits for a save after SIGTERM before it kills; longer than a save takes.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 # else USR1 ends the launcher
