"""Where rallypoint deliberately does otherwise than torch, name by name.

This is the one table: the tests that compare the two read it and accept nothing else, nor a row that is no longer true; the page
"Coming from torchrun" shows it. The aspect is ``lacking`` for a name that there is not, ``signature``, ``abstract``, ``methods``
or the name of a member for what introspection shows, and ``case: fact`` for what a case of the conformance suite shows.
"""

from __future__ import annotations

from rallypoint.base.records import Value

__all__ = ["DIFFERENCES", "Difference", "markdown"]


class Difference(Value):
    """One of them: in which of torch's modules, of which name, in what; how torch does it, how we do it, and why."""

    module: str
    name: str
    aspect: str
    torch: str
    ours: str
    why: str


_MULTIPROCESSING = "torch.distributed.elastic.multiprocessing"
_ERRORS = f"{_MULTIPROCESSING}.errors"
_RENDEZVOUS = "torch.distributed.elastic.rendezvous"
_AGENT = "torch.distributed.elastic.agent.server"
_STORE = "torch.distributed.elastic.utils.store"

_SURFACE = (
    Difference(
        f"{_MULTIPROCESSING}.api", "LogsSpecs", "abstract",
        "root_log_dir must be overridden", "it has a default",
        "what was written for earlier versions, where it did not exist, still works",
    ),
    Difference(
        f"{_RENDEZVOUS}.api", "RendezvousStoreInfo", "build",
        "local_addr must be given", "it may be left out",
        "both the form of today and that of earlier versions are accepted",
    ),
    Difference(
        f"{_RENDEZVOUS}.etcd_rendezvous", "EtcdRendezvous", "methods",
        "the phases of a rendezvous on etcd's v2 API", "only what EtcdRendezvousHandler needs to know",
        "etcd has no v2 API any more; what happens on its v3 API is not divided in this way",
    ),
    *(
        Difference(
            f"{_RENDEZVOUS}.etcd_store", "EtcdStore", method,
            f"the second parameter is called {theirs}", f"it is called {ours}", "as with every other store",
        )
        for method, theirs, ours in (("add", "num", "amount"), ("wait", "override_timeout", "timeout"))
    ),
)  # fmt: skip

_PROCESSES = (
    Difference(
        f"{_AGENT}.api", "SimpleElasticAgent", "agents.a_run_that_is_not_needed: answer",
        "run returns None after RendezvousGracefulExitError, on which the launcher crashes", "an empty success",
        "a node that is not needed has not failed",
    ),
    Difference(
        f"{_AGENT}.local_elastic_agent", "LocalElasticAgent", "agents.the_local_agent_whose_workers_fail: failures",
        "workers that the agent ended itself are failures too", "only those that failed by themselves",
        "a victim is not a cause",
    ),
    *(
        Difference(
            f"{_MULTIPROCESSING}.api", "PContext", f"processes.a_failure_ends_the_others: {wait}: who was stopped",
            "workers that were stopped because another failed are failures too", "only those that failed by themselves",
            "a victim is not a cause",
        )
        for wait in ("wait", "for a time")
    ),
    *(
        Difference(
            f"{_AGENT}.local_elastic_agent", "LocalElasticAgent", f"agents.the_environment_of_workers: worker {rank}",
            "TORCHELASTIC_SIGNALS_TO_HANDLE is there only if the launcher set it for itself",
            "it is always there, and so is RALLYPOINT_GENERATION", "every worker finds the whole of its documented environment",
        )
        for rank in (0, 1)
    ),
    *(
        Difference(
            f"{_MULTIPROCESSING}.api", "Std", f"processes.streams_from_text: {text}",
            "refuses spaces", "spaces around a number do not matter", "they come with shell scripts, and mean nothing else",
        )
        for text in ("' 1'", "'1 '", "'0: 1'")
    ),
    Difference(
        f"{_MULTIPROCESSING}.api", "LogsSpecs", "processes.log_files_of_ones_own: text",
        "a LogsSpecs of one's own has to put TORCHELASTIC_ERROR_FILE into the environments", "it need only name the files",
        "every worker finds the whole of its documented environment",
    ),
    Difference(
        "torch.distributed.run", "main", "arguments.logs_of_whole_runs: restarted",
        "what a worker whose stderr is not redirected said before it failed is lost", "its end is kept, as stderr_tail.log",
        "the error itself is what a reader needs",
    ),
    Difference(
        _MULTIPROCESSING, "start_processes", "processes.programs_that_cannot_be_started: none",
        "starts nothing, successfully", "refused", "nobody asks for no worker on purpose",
    ),
    Difference(
        f"{_MULTIPROCESSING}.subprocess_handler.subprocess_handler", "SubprocessHandler", "processes.one_process_by_hand: close",
        "ProcessLookupError where the process has ended", "nothing to do", "whoever closes need not know who was faster",
    ),
    Difference(
        f"{_MULTIPROCESSING}.tail_log", "tail_logfile", "processes.the_tail_of_one_file: lines",
        "shows no line where no filter is given", "shows all lines", "no filter means that nothing is filtered",
    ),
)  # fmt: skip

_FAILURES = (
    Difference(
        _ERRORS, "ProcessFailure", "errors.a_failure_without_an_error_file: data",
        "a placeholder", "what is known of the end", "a reader finds the cause wherever he looks",
    ),
    Difference(
        _ERRORS, "ProcessFailure", "errors.a_failure_without_an_error_file: message",
        "a hint at the documentation", "how the process ended, and its last exception where stderr shows one",
        "the error itself is what a reader needs",
    ),
    Difference(
        _ERRORS, "ProcessFailure", "errors.a_failure_with_an_error_file: message",
        "the whole object, where the file has one", "its text", "it is declared as a text; the object is in error_file_data",
    ),
    Difference(
        _ERRORS, "ProcessFailure", "errors.a_failure_with_an_error_file: bad json",
        "raises", "is left aside, with a warning", "a broken file must not hide the failure that it is about",
    ),
    Difference(
        _ERRORS, "ProcessFailure", "errors.a_failure_with_an_error_file: another shape",
        "raises", "is left aside, with a warning", "a broken file must not hide the failure that it is about",
    ),
    Difference(
        _ERRORS, "ChildFailedError", "errors.the_error_of_failed_children: says",
        "rank, exit code, file name and stack of the first by whole seconds", "the cause first, with its message and frames",
        "the summary is made to be acted on",
    ),
    Difference(
        _ERRORS, "ChildFailedError", "errors.errors_that_travel: error",
        "cannot be unpickled", "can be", "launchers are run in processes of their own",
    ),
    *(
        Difference(
            _ERRORS, "record", f"errors.record_with_a_handler_of_ones_own: {fact}",
            "before 2.15: a handler is not told which function runs, nor that it has returned", "it is told, as by 2.15",
            "handlers written for either version work",
        )
        for fact in ("calls", "fine")
    ),
    Difference(
        _ERRORS, "record", "errors.record_leaves_an_error_file: keys",
        "the time in whole seconds", "timestamp_ns too", "which failure came first is decided below a second",
    ),
    Difference(
        _ERRORS, "record", "errors.record_leaves_an_error_file: without its folder",
        "raises FileNotFoundError instead of the program's error", "raises the program's error",
        "recording must not hide what it records",
    ),
)  # fmt: skip

_MEETING = (
    Difference(
        f"{_RENDEZVOUS}.api", "RendezvousParameters", "rendezvous.parameters_as_numbers: []",
        "TypeError", "UsageError, a ValueError", "bad input is one kind of error, which names the setting",
    ),
    *(
        Difference(
            f"{_RENDEZVOUS}.api", "RendezvousParameters", f"rendezvous.parameters_as_booleans: {word!r}",
            "ValueError", f"{truth}", "every flag and setting takes the same words for yes and no",
        )
        for word, truth in (("on", True), ("off", False))
    ),
    Difference(
        f"{_RENDEZVOUS}.api", "rendezvous_handler_registry", "rendezvous.the_registry_of_the_process: a name of its own",
        "a built-in back end's name cannot be registered", "it can be, once, and goes before ours",
        "a program may bring its own back end under a name that its users know",
    ),
    Difference(
        f"{_RENDEZVOUS}.utils", "parse_rendezvous_endpoint", "rendezvous.endpoints: '::1'",
        "host ':' and port 1", "host '::1' and the default port", "it is an IPv6 address",
    ),
    Difference(
        f"{_RENDEZVOUS}.utils", "parse_rendezvous_endpoint", "rendezvous.endpoints: 'host:5:6'",
        "host 'host:5'", "refused", "there is no such host",
    ),
    Difference(
        f"{_RENDEZVOUS}.etcd_rendezvous", "EtcdRendezvousHandler", "rendezvous.a_handler_of_etcd: agent store",
        "use_agent_store is False", "it is True", "every generation has an empty store for its workers, held by the agent",
    ),
    Difference(
        "torch.distributed.run", "get_rdzv_endpoint", "arguments.endpoints_of_arguments: static without port",
        "port 'None'", "port 29500", "29500 is the documented default",
    ),
    Difference(
        "torch.distributed.run", "config_from_args",
        "arguments.configs_from_arguments: --nnodes 2 --node-rank 1 --master-addr h x.py",
        "port 'None'", "port 29500", "29500 is the documented default",
    ),
)  # fmt: skip

_STORES_AND_TIMERS = (
    *(
        Difference(
            _STORE, "barrier", f"stores.what_a_store_is_asked_for: barrier {rank}",
            "a rank is noted only where it can be translated", "a rank that is given is noted",
            "so that an error names who is missing",
        )
        for rank in (0, 1)
    ),
    Difference(
        _STORE, "synchronize", "stores.gathering_that_lacks_one: timeout kept",
        "the store keeps the timeout of a call that failed", "it has its own again", "a failed call leaves nothing behind",
    ),
    Difference(
        _STORE, "store_timeout", "stores.a_timeout_for_a_while: after that",
        "the store keeps the timeout when the block raises", "it has its own again", "so does every context manager",
    ),
    Difference(
        "torch.distributed.elastic.timer.api", "expires", "timers.expires_asks_the_client: scope by place",
        "a scope without a name is called after a line of contextlib", "after the caller's line",
        "two timers must not share a scope",
    ),
)  # fmt: skip

DIFFERENCES = _SURFACE + _PROCESSES + _FAILURES + _MEETING + _STORES_AND_TIMERS


def markdown() -> str:
    """A table for the documentation: one row for each name and difference; one that several facts show has one row."""
    rows = dict.fromkeys(map(_row, DIFFERENCES))
    return "\n".join(["| name | torch | rallypoint | because |", "|---|---|---|---|", *rows])


def _row(one: Difference) -> str:
    name = f"`{one.module.removeprefix('torch.distributed.')}.{one.name}`"
    return "| " + " | ".join(text.replace("|", "\\|") for text in (name, one.torch, one.ours, one.why)) + " |"
