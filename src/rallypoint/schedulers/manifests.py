"""What starts a job under a scheduler, as text to be kept and changed: a batch script for Slurm, a manifest for Kubernetes.

It is written for whoever reads it next: each line that might be changed says why it is there.
"""

from __future__ import annotations

from rallypoint.base import defaults
from rallypoint.errors import ExitCode

__all__ = ["MARGIN_S", "kubernetes", "slurm"]

MARGIN_S = 15  # from the launcher's SIGKILL to its workers, to the pod's own


def slurm(nodes: int, gpus: int, command: str) -> str:
    no_gpus = "# No GPUs: give rallyrun --nproc-per-node N for more than one worker on each node."
    return f"""\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1        # one launcher on each node: it starts all workers there
{f"#SBATCH --gpus-per-node={gpus}          # a worker for each" if gpus else no_gpus}
#SBATCH --cpus-per-task={16 * max(gpus, 1)}
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append         # a job that is requeued goes on in the same file
#SBATCH --requeue
#SBATCH --signal=USR1@90           # before the time limit: all ranks may save at one step, see rallypoint.worker.save_point

# To go on without a node that dies, with at least MIN: uncomment these two, and use the second line of srun.
##SBATCH --no-kill
##SBATCH --no-requeue             # instead of --requeue above

# The nodes, where they meet, the run ID and the number of workers come from Slurm; `rallyrun --dry-run` shows them.
srun rallyrun --max-restarts 3 --drain-signals USR1 --drain-grace 80 {command}
#srun --no-kill --kill-on-bad-exit=0 rallyrun --nnodes MIN:{nodes} --max-restarts 3 {command}

# {ExitCode.PREEMPTED}: all have saved, and the job is to go on later.
# {ExitCode.UNSAVED}: there was no time for that; requeue it then, too, if the program has checkpoints of its own.
code=$?
if [ $code -eq {ExitCode.PREEMPTED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


def kubernetes(name: str, image: str, nodes: int, gpus: int, command: str) -> str:
    workers = max(gpus, 1)
    resources = f'\n          resources: {{limits: {{nvidia.com/gpu: "{gpus}"}}}}' if gpus else ""
    return f"""\
# The pods find each other by this Service, also before they are ready.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{job-name: {name}}}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: {2 * nodes}  # pods that may be lost and replaced; a worker that fails is restarted within its pod
  podFailurePolicy:
    rules:
      # 2: bad input; 65: a failure that no restart can help; 79: somebody has stopped the job (rallypoint stop).
      - action: FailJob
        onExitCodes: {{containerName: agent, operator: In, values: {[ExitCode.USAGE, ExitCode.HOPELESS, ExitCode.STOPPED]}}}
      # A pod that was evicted or preempted is replaced, and does not count; nor does one that left after notice (--drain-grace).
      - action: Ignore
        onExitCodes: {{containerName: agent, operator: In, values: {[ExitCode.PREEMPTED, ExitCode.UNSAVED]}}}
      - action: Ignore
        onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
  template:
    metadata:
      labels: {{job-name: {name}}}
    spec:
      subdomain: {name}  # the Service: it gives each pod a name that the others find
      restartPolicy: Never
      terminationGracePeriodSeconds: {defaults.SHUTDOWN_TIMEOUT_S + MARGIN_S}  # more than --shutdown-timeout
      containers:
        - name: agent
          image: {image}
          command: [rallyrun, --max-restarts, "3", --health-port, "8080", --health-addr, 0.0.0.0, {command}]
          env:
            - {{name: PET_NNODES, value: "{nodes}"}}  # or "MIN:{nodes}", to go on while a lost pod is replaced
            - {{name: PET_NPROC_PER_NODE, value: "{workers}"}}
            # Without the job's secret, whoever reaches a pod of this job can end it:
            #   kubectl create secret generic {name} --from-literal=secret="$(openssl rand -hex 32)"
            - name: {defaults.ENV_SECRET}
              valueFrom: {{secretKeyRef: {{name: {name}, key: secret, optional: true}}}}
          readinessProbe: {{httpGet: {{path: /readyz, port: 8080}}}}
          livenessProbe: {{httpGet: {{path: /healthz, port: 8080}}, failureThreshold: 6}}{resources}
"""
