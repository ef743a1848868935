/* A libnvidia-ml.so.1 without a GPU, for tests: it answers what a text file says.
 *
 * NVML_STUB_CONFIG names the file; it is read anew at every call. Each line is `key=value`:
 *
 *   error=9                    every call answers this code (the driver is not loaded)
 *   error.CALL=9               this call does; CALL is the function's name without "nvml" or "nvmlDevice" before it,
 *                              GetMemoryInfo_v2 say
 *   generation=1               a number that changes when the driver is restarted: all calls then answer UNINITIALIZED
 *                              until NVML was shut down and initialised again, and older handles are invalid
 *   gpus=2                     how many there are
 *   gpu.0.error=15             as above, for the first of them only
 *   gpu.0.error.CALL=3
 *   gpu.0.name=...             .uuid, .memory_total_mb, .memory_reserved_mb, .memory_used_mb, .utilization_percent,
 *                              .temperature_c, .power_draw_w, .power_limit_w
 *   gpu.0.compute=12:300,13:-  processes with their memory in MiB, "-" if it is not to be had; .graphics likewise
 *   gpu.0.ancestor.1=50        the common ancestor of the first two (NVML_TOPOLOGY_SYSTEM); the lower index comes first
 *   gpu.0.nvlink.1=0           whether NVLink joins them: 0 is NVML_P2P_STATUS_OK
 *   gpu.0.mig=1                MIG is on; not there: the GPU does not know MIG
 *   gpu.0.mig_max=7
 *   gpu.0.mig.1.uuid=...       the second MIG device, with the same keys as a GPU
 *
 * A value that is not in the file is NOT_SUPPORTED. No file: DRIVER_NOT_LOADED. If NVML_STUB_LOG names a file, the name
 * of every call that is made is written to it.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    ARGUMENT_VERSION_MISMATCH = 25,
};

#define MEMORY_V2 0x02000028u
#define TEMPERATURE_V1 0x0100000cu
#define LINE 65536
#define NVLINK 2u
#define MIB (1024.0 * 1024.0)

struct device {
    char prefix[64]; /* of its keys: "gpu.0." or "gpu.0.mig.1." */
    char gpu[64];    /* of those of the GPU it is or is a part of */
    long generation;
};

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct utilization { unsigned gpu, memory; };
struct temperature { unsigned version; unsigned sensor; int degrees; };
struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };

static unsigned initialised = 0;
static long generation = 0;

/* The value of a key into `out`; 0 if it is not there. */
static int look_up(const char *prefix, const char *key, char *out)
{
    const char *path = getenv("NVML_STUB_CONFIG");
    FILE *file = path ? fopen(path, "r") : NULL;
    char wanted[256];
    char *line = NULL;
    size_t size = 0;
    int found = 0;
    if (!file)
        return 0;
    snprintf(wanted, sizeof wanted, "%s%s=", prefix, key);
    while (!found && getline(&line, &size, file) >= 0) {
        if (strncmp(line, wanted, strlen(wanted)) == 0) {
            line[strcspn(line, "\n")] = 0;
            snprintf(out, LINE, "%s", line + strlen(wanted));
            found = 1;
        }
    }
    free(line);
    fclose(file);
    return found;
}

static int number(const char *prefix, const char *key, double *out)
{
    char value[LINE];
    if (!look_up(prefix, key, value))
        return NOT_SUPPORTED;
    *out = atof(value);
    return SUCCESS;
}

static long number_or(const char *prefix, const char *key, long otherwise)
{
    double value;
    return number(prefix, key, &value) == SUCCESS ? (long)value : otherwise;
}

static int error_of(const char *prefix, const char *call)
{
    char key[160];
    snprintf(key, sizeof key, "error.%s", call);
    long code = number_or(prefix, key, SUCCESS);
    return (int)(code != SUCCESS ? code : number_or(prefix, "error", SUCCESS));
}

static void note(const char *call)
{
    const char *path = getenv("NVML_STUB_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file)
        return;
    fprintf(file, "%s\n", call);
    fclose(file);
}

/* What a call answers before it has begun. */
static int begin(const char *call)
{
    char value[LINE];
    note(call);
    if (!look_up("", "gpus", value))
        return DRIVER_NOT_LOADED;
    int code = error_of("", call);
    if (code != SUCCESS)
        return code;
    return initialised && generation == number_or("", "generation", 0) ? SUCCESS : UNINITIALIZED;
}

static int begin_on(const struct device *device, const char *call)
{
    int code = begin(call);
    if (code != SUCCESS)
        return code;
    if (!device || device->generation != generation)
        return INVALID_ARGUMENT;
    code = error_of(device->gpu, call);
    return code != SUCCESS ? code : error_of(device->prefix, call);
}

/* Handles are never given back, as in NVML; a test makes few. */
static struct device *handle(const char *prefix, const char *gpu)
{
    struct device *device = calloc(1, sizeof *device);
    snprintf(device->prefix, sizeof device->prefix, "%s", prefix);
    snprintf(device->gpu, sizeof device->gpu, "%s", gpu);
    device->generation = generation;
    return device;
}

static int text(const struct device *device, const char *call, const char *key, char *out, unsigned length)
{
    char value[LINE];
    int code = begin_on(device, call);
    if (code != SUCCESS)
        return code;
    if (!look_up(device->prefix, key, value))
        return NOT_SUPPORTED;
    if (strlen(value) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

static int scaled(const struct device *device, const char *call, const char *key, double scale, unsigned *out)
{
    double value = 0;
    int code = begin_on(device, call);
    if (code == SUCCESS)
        code = number(device->prefix, key, &value);
    if (code == SUCCESS)
        *out = (unsigned)(value * scale + 0.5);
    return code;
}

static int memory_of(const struct device *device, double *total, double *reserved, double *used)
{
    *reserved = (double)number_or(device->prefix, "memory_reserved_mb", 0);
    int code = number(device->prefix, "memory_total_mb", total);
    return code != SUCCESS ? code : number(device->prefix, "memory_used_mb", used);
}

static int processes(const struct device *device, const char *call, const char *key, unsigned *count, struct process *out)
{
    char value[LINE];
    unsigned found = 0, room = *count;
    int code = begin_on(device, call);
    if (code != SUCCESS)
        return code;
    if (!look_up(device->prefix, key, value))
        return NOT_SUPPORTED;
    for (char *rest = value, *item; (item = strtok_r(rest, ",", &rest)); found++) {
        char *memory = strchr(item, ':');
        if (found >= room)
            continue;
        out[found].pid = (unsigned)strtoul(item, NULL, 10);
        out[found].memory = !memory || memory[1] == '-' ? ~0ull : (unsigned long long)(atof(memory + 1) * MIB);
        out[found].gpu_instance = out[found].compute_instance = ~0u;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    int code = begin("InitWithFlags");
    if (code != SUCCESS && code != UNINITIALIZED)
        return code;
    /* As in NVML: only the first of several does anything. */
    if (initialised++ == 0)
        generation = number_or("", "generation", 0);
    return SUCCESS;
}

int nvmlShutdown(void)
{
    int code = begin("Shutdown");
    if (initialised)
        initialised--;
    return code;
}

const char *nvmlErrorString(int code)
{
    static char words[64];
    snprintf(words, sizeof words, "stub error %d", code);
    return words;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int code = begin("GetCount_v2");
    if (code == SUCCESS)
        *count = (unsigned)number_or("", "gpus", 0);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out)
{
    char prefix[64];
    int code = begin("GetHandleByIndex_v2");
    if (code != SUCCESS)
        return code;
    if (index >= (unsigned)number_or("", "gpus", 0))
        return INVALID_ARGUMENT;
    snprintf(prefix, sizeof prefix, "gpu.%u.", index);
    code = error_of(prefix, "GetHandleByIndex_v2");
    if (code == SUCCESS)
        *out = handle(prefix, prefix);
    return code;
}

int nvmlDeviceGetName(struct device *device, char *out, unsigned length)
{
    return text(device, "GetName", "name", out, length);
}

int nvmlDeviceGetUUID(struct device *device, char *out, unsigned length)
{
    return text(device, "GetUUID", "uuid", out, length);
}

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *out)
{
    double total = 0, reserved = 0, used = 0;
    int code = begin_on(device, "GetMemoryInfo");
    if (code == SUCCESS)
        code = memory_of(device, &total, &reserved, &used);
    if (code != SUCCESS)
        return code;
    /* The first version counts what is reserved as used. */
    out->total = (unsigned long long)(total * MIB);
    out->used = (unsigned long long)((used + reserved) * MIB);
    out->free = out->total - out->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *out)
{
    double total = 0, reserved = 0, used = 0;
    int code = begin_on(device, "GetMemoryInfo_v2");
    if (code == SUCCESS && out->version != MEMORY_V2)
        code = ARGUMENT_VERSION_MISMATCH;
    if (code == SUCCESS)
        code = memory_of(device, &total, &reserved, &used);
    if (code != SUCCESS)
        return code;
    out->total = (unsigned long long)(total * MIB);
    out->reserved = (unsigned long long)(reserved * MIB);
    out->used = (unsigned long long)(used * MIB);
    out->free = out->total - out->used - out->reserved;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(struct device *device, struct utilization *out)
{
    out->memory = 0;
    return scaled(device, "GetUtilizationRates", "utilization_percent", 1, &out->gpu);
}

int nvmlDeviceGetTemperature(struct device *device, unsigned sensor, unsigned *out)
{
    (void)sensor;
    return scaled(device, "GetTemperature", "temperature_c", 1, out);
}

int nvmlDeviceGetTemperatureV(struct device *device, struct temperature *out)
{
    unsigned degrees = 0;
    int code = scaled(device, "GetTemperatureV", "temperature_c", 1, &degrees);
    if (code == SUCCESS && out->version != TEMPERATURE_V1)
        code = ARGUMENT_VERSION_MISMATCH;
    out->degrees = (int)degrees;
    return code;
}

int nvmlDeviceGetPowerUsage(struct device *device, unsigned *out)
{
    return scaled(device, "GetPowerUsage", "power_draw_w", 1000, out);
}

int nvmlDeviceGetEnforcedPowerLimit(struct device *device, unsigned *out)
{
    return scaled(device, "GetEnforcedPowerLimit", "power_limit_w", 1000, out);
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count, struct process *out)
{
    return processes(device, "GetComputeRunningProcesses_v3", "compute", count, out);
}

int nvmlDeviceGetComputeRunningProcesses_v2(struct device *device, unsigned *count, struct process *out)
{
    return processes(device, "GetComputeRunningProcesses_v2", "compute", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *device, unsigned *count, struct process *out)
{
    return processes(device, "GetGraphicsRunningProcesses_v3", "graphics", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(struct device *device, unsigned *count, struct process *out)
{
    return processes(device, "GetGraphicsRunningProcesses_v2", "graphics", count, out);
}

static int of_pair(const struct device *one, const struct device *other, const char *call, const char *key, unsigned *out)
{
    char name[96];
    unsigned first, second;
    int code = begin_on(other, call);
    if (code != SUCCESS)
        return code;
    if (!one || sscanf(one->gpu, "gpu.%u.", &first) != 1 || sscanf(other->gpu, "gpu.%u.", &second) != 1)
        return INVALID_ARGUMENT;
    snprintf(name, sizeof name, "%s.%u", key, first < second ? second : first);
    return scaled(first < second ? one : other, call, name, 1, out);
}

int nvmlDeviceGetTopologyCommonAncestor(struct device *one, struct device *other, unsigned *level)
{
    return of_pair(one, other, "GetTopologyCommonAncestor", "ancestor", level);
}

int nvmlDeviceGetP2PStatus(struct device *one, struct device *other, unsigned capability, unsigned *status)
{
    return capability == NVLINK ? of_pair(one, other, "GetP2PStatus", "nvlink", status) : NOT_SUPPORTED;
}

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending)
{
    int code = scaled(device, "GetMigMode", "mig", 1, current);
    *pending = *current;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *out)
{
    return scaled(device, "GetMaxMigDeviceCount", "mig_max", 1, out);
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **out)
{
    char prefix[96], uuid[LINE];
    int code = begin_on(device, "GetMigDeviceHandleByIndex");
    if (code != SUCCESS)
        return code;
    snprintf(prefix, sizeof prefix, "%smig.%u.", device->prefix, index);
    if (!look_up(prefix, "uuid", uuid))
        return NOT_FOUND;
    *out = handle(prefix, device->gpu);
    return SUCCESS;
}
