"""One file per question: `experiments/<name>.py` holds an `EXPERIMENT`, `conf/experiment/<name>.yaml` its grid."""
