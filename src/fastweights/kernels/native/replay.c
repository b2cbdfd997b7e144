/* Calls that are made one after the other, until one fails, and what they count. */
#include "replay.h"
#include "pool.h"

int FOR_ISA(fw_replay)(const Replay *p)
{
    int status = DONE;
    for (int64_t i = 0; i < p->count && status == DONE; i++)
        status = p->calls[i].run(p->calls[i].problem);
    return status;
}

int FOR_ISA(fw_advance)(const Counters *p)
{
    for (int64_t i = 0; i < p->count; i++)
        if (*p->numbers[i] < p->most[i])
            ++*p->numbers[i];
    return DONE;
}
