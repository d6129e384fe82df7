"""A line of the log for each request that ends or is refused, and the load now and then."""

import logging

from control_plane.observe.load_log import PERIOD_S, LoadLog
from control_plane.observe.observer import EndedRequest
from control_plane.observe.request_log import log_ended, log_refused
from control_plane.scheduler.scheduler import Scheduler
from harness.services.drained_seat import drained_scheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, FinishReason, TransferDone


def fields(record):
    return record.fields


def test_an_ended_request_is_one_line(caplog):
    caplog.set_level(logging.INFO)
    request = EndedRequest(
        100, 3, 30, 0.25, 0.1, 0.1, 0.04, "chatcmpl-a", 7, "/v1/chat/completions", "ada", 2, 4, 2
    )
    log_ended(FinishReason.LENGTH, request)
    (record,) = caplog.records
    assert fields(record) == {
        "id": "chatcmpl-a", "number": 7, "endpoint": "/v1/chat/completions", "tenant": "ada",
        "reason": "length", "tokens_in": 100, "tokens_out": 3, "queue_s": 0.1, "prefill_s": 0.1,
        "decode_s": 0.04, "total_s": 0.25, "cp_degree": 4, "moe_binding": 2, "attempts": 2,
    }  # fmt: skip


def test_the_services_fault_is_a_warning(caplog):
    caplog.set_level(logging.INFO)
    log_ended(FinishReason.FAILED, EndedRequest(1, 0, 1, 0.1, None, None, None, message="lost"))
    log_refused("a", "Generate", FinishReason.INVALID, "prompt is empty")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert fields(caplog.records[1]) == {
        "id": "a", "endpoint": "Generate", "reason": "invalid", "error": "prompt is empty",
    }  # fmt: skip


def test_a_refusal_of_a_service_that_drains_is_no_failure(caplog):
    caplog.set_level(logging.INFO)
    log_refused("a", "Generate", FinishReason.FAILED, "the service is draining")
    assert fields(caplog.records[0])["reason"] == "refused"
    assert caplog.records[0].name == "nanocp.requests", "a name that does not move"


def test_the_load_is_logged_while_requests_are_open(caplog):
    caplog.set_level(logging.INFO)
    cluster = ClusterConfig(num_instances=1, num_frames=8, max_model_len=1000)
    scheduler = Scheduler(cluster, SchedulerConfig())
    log = LoadLog(0.0)
    log.tick(PERIOD_S, scheduler, 0)
    assert caplog.records == [], "nothing to say"
    plan = scheduler.plan_window([Arrival(1, 200, 10), Arrival(2, 400, 100)], 0)
    log.tick(PERIOD_S + 1, scheduler, 0)
    assert caplog.records == [], "not yet"
    log.tick(2 * PERIOD_S, scheduler, 50)
    scheduler.plan_window([TransferDone(plan.transfers[0].ticket, 0)], 1)
    log.tick(3 * PERIOD_S, scheduler, 50)
    first, second = map(fields, caplog.records)
    assert (first["running"], first["prefilling"], first["queued"]) == (0, 1, 1)
    assert first["tokens_per_s"] == 5.0
    assert (second["running"], second["prefilling"], second["queued"]) == (1, 0, 1)
    assert second["tokens_per_s"] == 0 and 0 < second["kv_usage"] < 1


def test_a_seat_that_serves_nothing_is_not_in_the_load(caplog):
    caplog.set_level(logging.INFO)
    LoadLog(0.0).tick(PERIOD_S, drained_scheduler(), 0)
    (load,) = map(fields, caplog.records)
    assert (load["frames_free"], load["kv_usage"]) == (0, 1.0)
