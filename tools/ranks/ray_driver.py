"""A run on a cluster: ray_driver.py ADDRESS FOLDER JOBS. JOBS is a list of jobs as JSON; prints each that has ended."""

import json
import sys
from pathlib import Path

from blocktune.tuner.cluster import executor as ray_executor
from blocktune.tuner.cluster.connection import connect_cluster
from blocktune.tuner.fleet.job import Finished, Job
from tests.support.ranks.ray_clusters import LoggedRecords
from tools import program

if __name__ == "__main__":
    address, folder, jobs = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    LoggedRecords.log = folder / "log"
    ray_executor.ReceivedRecords = LoggedRecords  # type: ignore[misc]
    with connect_cluster(address):
        executor = ray_executor.RayExecutor(
            command=(*program("workers.landscape_fleet_worker"), str(folder)),
            ahead_command=(*program("workers.landscape_ahead_worker"), str(folder)),
        )
        for event in executor.run([Job.from_json(job) for job in jobs]):
            if isinstance(event, Finished):
                sys.stdout.write(f"{event.job.shape.batch}\n")
