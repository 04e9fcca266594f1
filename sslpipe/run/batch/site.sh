# What differs from site to site; each may be set before, in the environment or above this.

# Processes a node: one a GPU where the job has GPUs, else this many.
SSLPIPE_CPU_PROCESSES=${SSLPIPE_CPU_PROCESSES:-1}

# Starts that may follow one another without a new checkpoint before the job gives up.
SSLPIPE_MAX_IDLE_STARTS=${SSLPIPE_MAX_IDLE_STARTS:-3}

# Options of every srun, and words before the program: a container, say.
#   pyxis:      srun_options=(--container-image=/images/sslpipe.sqsh --container-mounts=/data)
#   apptainer:  inside=(apptainer exec --nv --bind /data /images/sslpipe.sif)
declare -p srun_options &>/dev/null || srun_options=(--kill-on-bad-exit=1)
declare -p inside &>/dev/null || inside=()

# Threads of each process outside torch's own.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A hung NCCL collective ends the job and leaves its history.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000

# How long the launcher waits for a save after SIGTERM before it kills; longer than a save takes.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 # else USR1 ends the launcher
