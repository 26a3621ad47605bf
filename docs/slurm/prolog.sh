#!/bin/bash
# Before a job: the node's daemon (docs/systemd) leaves the device, and what others found since comes down. A part of Prolog=
# in slurm.conf; runs as root. Whatever happens here, the job starts: a Prolog that fails would drain the node.
GEMMTUNED="${GEMMTUNED:-/opt/gemmtuned/bin/gemmtuned}"
GEMMTUNED_HOME="${GEMMTUNED_HOME:-/var/lib/gemmtuned}"
export GEMMTUNED_HOME

systemctl stop gemmtuned
if [ -n "${GEMMTUNED_SYNC:-}" ]; then
    timeout 20 runuser -u gemmtuned -- "$GEMMTUNED" sync "$GEMMTUNED_SYNC" >/dev/null
fi
exit 0
