"""Jobs that generate together: each is a lane of one decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...generate import CachedDecoder, StreamState
from ...model import CompressiveTransformer
from ...model.embedding import token_nats
from .jobs import Job


@dataclass(eq=False)
class JobLane:
    """One job, its row of the decoder's batch and the logits of its next token `[vocab_size]`."""

    job: Job
    place: int
    logits: Tensor


class JobLanes:
    """All lanes of a decoder. They join and leave between two steps and may have any ages."""

    def __init__(self, model: CompressiveTransformer) -> None:
        self._decoder = CachedDecoder(model)
        self._lanes: list[JobLane] = []  # in the order of the decoder

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[JobLane]:
        return iter(tuple(self._lanes))  # lanes may leave meanwhile

    def join(self, job: Job) -> None:
        """Add a job that has read its tokens."""
        assert job.state.logits is not None
        self._lanes.append(JobLane(job, self._decoder.join(job.state.memory), job.state.logits))

    def leave(self, lane: JobLane) -> Job:
        """Remove a lane; return its job, which has the state after all generated tokens."""
        lane.job.pause(self._decoder.leave(lane.place), lane.logits)
        last = self._lanes.pop()
        if last is not lane:  # the decoder moves its last lane, too
            last.place = lane.place
            self._lanes[lane.place] = last
        return lane.job

    def state_of(self, job: Job) -> StreamState:
        """Return the present state of a job, in a lane or not."""
        for lane in self._lanes:
            if lane.job is job:
                return job.state_at(self._decoder.lane(lane.place), lane.logits)
        return job.state

    @torch.no_grad()
    def step(self) -> None:
        """Generate one token in each lane."""
        logits = torch.stack([lane.logits for lane in self._lanes])
        tokens = [lane.job.writer.draw(lane.logits) for lane in self._lanes]
        inputs = torch.tensor(tokens, device=logits.device)
        nats = token_nats(logits[None], inputs[None])[0].tolist()
        for lane, token, nat, row in zip(self._lanes, tokens, nats, self._decoder.step(inputs), strict=True):
            lane.logits = row
            lane.job.write(token, nat)
