"""What trajectories.py learns from: plays that are simulated, not recorded.

Eleven attackers run to spots of their own and sometimes choose another one, eleven
defenders each follow an attacker, and the ball follows the attacker who has it, or to
whom it has been passed. All keep their momentum and keep away from one another. Spots
and passes change at random, so a play has several futures that are as likely.
"""

import numpy as np

VERSION = 1  # to be raised when the plays change
FIELD = np.array([105.0, 68.0], np.float32)  # metres
TEAM = np.repeat([0, 1, 2], [11, 11, 1])  # attack, defence, ball
TRACKS = len(TEAM)
SECONDS = 0.1  # from a frame to the next one

_TOP_SPEED = np.array([7.5, 7.5, 18.0], np.float32)[TEAM][:, None]  # metres a second
_INERTIA = np.array([1.2, 1.0, 0.5], np.float32)[TEAM][:, None]  # seconds
_PUSH = np.array([8.0, 8.0, 0.0], np.float32)[TEAM][:, None]  # of near players
_PUSH_RANGE = 1.5  # metres
_NEW_SPOT, _PASS = 0.03, 0.05  # chance in a frame
_WARM_UP = 6  # frames until they have found their places
_CHUNK = 250  # plays simulated at once


def simulate(plays: int, frames: int, seed: int) -> np.ndarray:
    """Positions in metres, float32 [plays, frames, TRACKS, 2]."""
    tracks = np.empty((plays, frames, TRACKS, 2), np.float32)
    for first in range(0, plays, _CHUNK):
        rng = np.random.default_rng([seed, first])
        _simulate(tracks[first : first + _CHUNK], rng)
    return tracks


def _simulate(tracks: np.ndarray, rng: np.random.Generator) -> None:
    plays, frames = tracks.shape[:2]
    every = np.arange(plays)
    middle = FIELD * rng.uniform(0.25, 0.75, (plays, 1, 2)).astype(np.float32)
    pos = middle + _normal(rng, (plays, TRACKS, 2)) * np.float32([16, 12])
    speed = np.float32([3, 3, 8])[TEAM][:, None] * _normal(rng, pos.shape)
    spot = pos[:, :11] + 12 * _normal(rng, (plays, 11, 2))
    attacker = rng.permuted(np.tile(np.arange(11), (plays, 1)), axis=1)
    carrier = rng.integers(11, size=plays)
    for frame in range(-_WARM_UP, frames):
        changed = rng.random((plays, 11)) < _NEW_SPOT
        spot[changed] = pos[:, :11][changed] + 12 * _normal(rng, (changed.sum(), 2))
        carrier = np.where(
            rng.random(plays) < _PASS, rng.integers(11, size=plays), carrier
        )
        followed = pos[every[:, None], attacker] - np.float32([1.5, 0])
        ball = pos[every, carrier][:, None]
        goal = np.clip(np.concatenate([spot, followed, ball], axis=1), 0, FIELD)
        wish = 2 * (goal - pos)
        norm = np.linalg.norm(wish, axis=-1, keepdims=True)
        wish *= _TOP_SPEED / np.maximum(norm, _TOP_SPEED)
        force = (wish - speed) / _INERTIA + _push(pos) + _normal(rng, pos.shape)
        speed += np.float32(SECONDS) * force
        pos = pos + np.float32(SECONDS) * speed
        if frame >= 0:
            tracks[:, frame] = pos


def _push(pos: np.ndarray) -> np.ndarray:
    """How strongly each is pushed away from those who are near."""
    square = np.einsum("...d,...d", pos, pos)
    square = square[:, :, None] + square[:, None] - 2 * pos @ pos.swapaxes(1, 2)
    near = np.exp(np.maximum(square, 0) / np.float32(-2 * _PUSH_RANGE**2))
    away = pos * near.sum(2, keepdims=True) - near @ pos  # sum of near * (pos - others)
    return _PUSH * away


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)
