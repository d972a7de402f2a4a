"""How the processes of a job find each other: who each of them is (`identity`), how it meets
the others under each launcher (`topology`, `meeting`, `hosts`), and the `store` they share."""

from phub_collective.rendezvous.interface import LocalRendezvous, Rendezvous, StoreRendezvous

__all__ = ["LocalRendezvous", "Rendezvous", "StoreRendezvous"]
