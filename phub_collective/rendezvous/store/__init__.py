"""The key-value store through which the processes of a job find each other."""

from phub_collective.rendezvous.store.board import Board, Collected, slot
from phub_collective.rendezvous.store.client import StoreClient
from phub_collective.rendezvous.store.server import StoreServer

__all__ = ["Board", "Collected", "StoreClient", "StoreServer", "slot"]
