"""The elastic rendezvous on the embedded store: from parameters, checked, to a handler. Nothing is opened yet."""

from __future__ import annotations

import os

from rallypoint import defaults, report
from rallypoint.errors import UsageError
from rallypoint.rendezvous.dynamic import DynamicRendezvous
from rallypoint.rendezvous.endpoint import parse_rendezvous_endpoint
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousParameters
from rallypoint.rendezvous.joining import embedded_terms
from rallypoint.rendezvous.meeting_place import Endpoint, MeetingPlace
from rallypoint.rendezvous.secret import load_secret
from rallypoint.rendezvous.settings import check_node_unit, describe, read_settings
from rallypoint.rendezvous.worker_store import WorkerStore, settings_for_worker_store

__all__ = ["create_handler"]


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, defaults.ELASTIC_PORT)
    if port == 0:
        raise UsageError(f"the endpoint {params.endpoint!r} has port 0; nodes that are to meet need one that all of them know")
    settings = read_settings(params.config, os.environ)
    check_node_unit(settings, params.min_nodes, params.max_nodes)
    report.info(f"rendezvous of {params.min_nodes} to {params.max_nodes} nodes at {Endpoint(host, port)}: {describe(settings)}")
    if not (params.endpoint or "").strip() and params.max_nodes > 1:
        report.warn(
            f"no endpoint is given, so the nodes meet at {Endpoint(host, port)}, where only agents on this machine can come;"
            f" for others give --rdzv-endpoint HOST:{port}, the same on all of them, where HOST is one of the nodes"
        )
    secret = load_secret(settings, os.environ)
    place = MeetingPlace(Endpoint(host, port), params.run_id, params.max_nodes, secret, settings)
    terms = embedded_terms(settings, params.max_nodes)
    return DynamicRendezvous(params, settings, place, terms, WorkerStore(settings_for_worker_store(settings, os.environ)))
