# What differs from site to site, in one place, for the scripts of this folder: edit it, or set the
# variables before sbatch. What else there is to set, and its default: sslpipe/run/batch/site.sh.

# The clone that holds this folder: the one sbatch was called in, unless set.
SSLPIPE_ROOT=${SSLPIPE_ROOT:-$SLURM_SUBMIT_DIR}
# Its Python environment (`make .venv/.installed` makes one), on a file system that all nodes see.
SSLPIPE_VENV=${SSLPIPE_VENV:-$SSLPIPE_ROOT/.venv}
export PATH=$SSLPIPE_VENV/bin:$PATH

# module load cuda/13.0
# srun_options=(--kill-on-bad-exit=1 --container-image=/images/sslpipe.sqsh)
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=eth0

. "$SSLPIPE_ROOT/sslpipe/run/batch/site.sh"
