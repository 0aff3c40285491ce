"""Several replicas: is synchronising once per window the large batch, and what does it save on the wire?"""

from accumulation_harness.config import Device
from accumulation_harness.config.questions import Need, Question, Study

QUESTION = Question(
    place=200,
    studies={
        "replicas": Study(
            needs=(Need("device", lambda c: c.device != Device.cuda, "cpu: the ranks are processes with gloo between them"),)
        )
    },
)
