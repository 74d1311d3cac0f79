"""Where each file of a store lies.

HOME/conserve.db                 the database (unless CONSERVE_STORE names another)
DATA/jobs/<id>/requests.parquet  the rendered requests, in execution order
DATA/jobs/<id>/inputs.parquet    the input rows, or a link to the Parquet file that holds them
DATA/jobs/<id>/inputs/*.parquet  links to the Parquet files that hold them, where there are several
DATA/jobs/<id>/results/*.parquet result shards
DATA/jobs/<id>/job.json          which store the job is of, and its record (`marks`)
DATA/jobs/<id>/deliveries/*.jsonl answers and errors as files of the Batch API
DATA/uploads/<store>/*.jsonl     files that clients of the Batch API uploaded
DATA/trash/                      what was swept up, for a week (`trash`)
HOME/sending/                    files on their way to a bucket
HOME/stores.json                 which databases were here (`lineage`)
HOME/backup.json                 what a backup holds (`manifest`); commands only read such a home
DATA/verified.json               which files were found whole today (`digests`)

DATA is HOME, unless CONSERVE_DATA names another folder or a bucket (`objects`).
"""

from conserve.store.files.objects import P

JOBS = "jobs"
REQUESTS = "requests.parquet"
INPUTS = "inputs.parquet"
PARTS = "inputs"
RESULTS = "results"
SENDING = "sending"
PROBES = "probes"


def jobs_folder(data: P) -> P:
    """Folder of all job folders."""
    return data / JOBS


def job_folder(data: P, job_id: str) -> P:
    """The folder of one job."""
    return jobs_folder(data) / job_id


def requests_file(data: P, job_id: str) -> P:
    """The rendered requests of one job."""
    return job_folder(data, job_id) / REQUESTS


def inputs_file(data: P, job_id: str) -> P:
    """The copied input rows of one job."""
    return job_folder(data, job_id) / INPUTS


def listed(folder: P) -> list[P]:
    """Files and folders right in a folder, in the order of their names; none if it is missing."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
