"""Write the job file of a cluster: several processes on several machines, preemption, requeue and resume.

Start with `workflow.py`; `slurm.sbatch` is the file that it fills in.
"""
