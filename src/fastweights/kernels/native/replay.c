/* Calls that are made one after the other, until one fails. */
#include "replay.h"
#include "pool.h"

int FOR_ISA(fw_replay)(const Replay *p)
{
    int status = DONE;
    for (int64_t i = 0; i < p->count && status == DONE; i++)
        status = p->calls[i].run(p->calls[i].problem);
    return status;
}
